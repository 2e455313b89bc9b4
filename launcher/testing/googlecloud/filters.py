"""The language of Google's list filters: comparisons, AND, OR, NOT and parentheses.

OR binds more tightly than AND, and adjacent comparisons are joined by AND
(https://cloud.google.com/logging/docs/view/logging-query-language). Which fields can be compared, and how, differs
between services. Unsupported syntax is refused, never ignored.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launcher.testing.googlecloud.wire import ApiError

Test = Callable[[Any], bool]
"""Returns whether an item matches."""

# Path parts with other characters than letters, digits and _ are quoted: labels."launch-run".
WORD = r'[\w.*/%-]+(?<=\.)"[^"\\]+"|[\w.*/%-]+'
TEXT = r'"(?:[^"\\]|\\.)*"'
TOKEN = re.compile(rf"\s*(?:(?P<mark>[()])|(?P<op><=|>=|!=|=|<|>|:|(?:eq|ne)(?=\s))|(?P<text>{TEXT})|(?P<word>{WORD}))")
ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LONGEST = 20_000


class Token(NamedTuple):
    """A token of a filter. `text` is without quotes; `at` is its first column, counted from 1."""

    kind: str
    text: str
    at: int


def compiled(text: str, compare: Callable[[str, str, Token], Test]) -> Test:
    """Compile a filter. `compare` returns the test of a field's value, by an operator. Raises ApiError 400."""
    if len(text) > LONGEST:
        raise ApiError(400, f"The filter is longer than {LONGEST} characters.")
    parser = _Parser(_tokens(text), compare)
    if parser.next.kind == "end":
        return lambda item: True
    passes = parser.all_of()
    if parser.next.kind != "end":
        raise unparseable(parser.next)
    return passes


def ordered(value_of: Callable[[Any], Any], sign: str, right: Any, token: Token) -> Test:
    """Return a comparison with an item's value. A missing value (None) is neither equal nor unequal."""
    if sign not in ORDERS:
        raise unparseable(token)
    return lambda item: (actual := value_of(item)) is not None and ORDERS[sign](actual, right)


def field_at(item: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    for name in path.split("."):
        item = item.get(name) if isinstance(item, Mapping) else None
    return item


def unparseable(token: Token) -> ApiError:
    """Return the refusal of a filter."""
    text = f"Unparseable filter: syntax error at line 1, column {token.at}, token '{token.text}'"
    return ApiError(400, text)


def _tokens(text: str) -> list[Token]:
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = TOKEN.match(text, at)
        if not match or match.lastgroup is None:
            unread = text[at:].lstrip()
            raise unparseable(Token("?", unread[:1], len(text) - len(unread) + 1))
        raw = match[match.lastgroup]
        plain = re.sub(r"\\(.)", r"\1", raw[1:-1]) if match.lastgroup == "text" else raw
        tokens.append(Token(match.lastgroup, plain, match.start(match.lastgroup) + 1))
        at = match.end()
    return [*tokens, Token("end", "", len(text) + 1)]


class _Parser:
    """A recursive-descent parser. `next` is the first unread token."""

    def __init__(self, tokens: list[Token], compare: Callable[[str, str, Token], Test]) -> None:
        self.tokens, self.compare = tokens, compare

    @property
    def next(self) -> Token:
        return self.tokens[0]

    def take(self, kind: str, text: str) -> bool:
        """Read the next token if it is this one."""
        same = self.next.kind == kind and self.next.text == text
        if same:
            self.tokens.pop(0)
        return same

    def must(self, *kinds: str) -> Token:
        if self.next.kind not in kinds:
            raise unparseable(self.next)
        return self.tokens.pop(0)

    def all_of(self) -> Test:
        tests = [self.any_of()]
        while self.take("word", "AND") or (self.next.kind != "end" and self.next.text != ")"):
            tests.append(self.any_of())
        return lambda item: all(test(item) for test in tests)

    def any_of(self) -> Test:
        tests = [self.term()]
        while self.take("word", "OR"):
            tests.append(self.term())
        return lambda item: any(test(item) for test in tests)

    def term(self) -> Test:
        if self.take("word", "NOT"):
            inner = self.term()
            return lambda item: not inner(item)
        if self.take("mark", "("):
            inner = self.all_of()
            if not self.take("mark", ")"):
                raise unparseable(self.next)
            return inner
        field, sign, value = self.must("word"), self.must("op").text, self.must("text", "word")
        if field.text in ("AND", "OR"):
            raise unparseable(field)
        return self.compare(field.text, sign, value)

"""A subset of Cloud Logging's query language: comparisons, AND, OR, NOT and parentheses.

OR binds more tightly than AND, and adjacent comparisons are joined by AND
(https://cloud.google.com/logging/docs/view/logging-query-language). Unsupported syntax is refused, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from google.logging.type import log_severity_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from launcher.testing.googlecloud.wire import COMPARISONS, ApiError

Test = Callable[[dict[str, Any]], bool]
"""Returns whether a log entry, as its JSON, matches."""

# Path parts with other characters than letters, digits and _ are quoted: labels."launch-run".
WORD = r'[\w.*/%-]+(?<=\.)"[^"\\]+"|[\w.*/%-]+'
TEXT = r'"(?:[^"\\]|\\.)*"'
TOKEN = re.compile(rf"\s*(?:(?P<mark>[()])|(?P<op><=|>=|!=|=|<|>|:)|(?P<text>{TEXT})|(?P<word>{WORD}))")
PAYLOADS = ("textPayload", "jsonPayload")
FIELDS = ("logName", "resource", "timestamp", "receiveTimestamp", "severity", "insertId", "labels", *PAYLOADS)
TIMES = ("timestamp", "receiveTimestamp")
LONGEST = 20_000


class Token(NamedTuple):
    """A token of a filter. `text` is without quotes; `at` is its first column, counted from 1."""

    kind: str
    text: str
    at: int


def compiled(text: str) -> Test:
    """Compile a filter. Raises ApiError 400."""
    if len(text) > LONGEST:
        raise ApiError(400, f"The filter is longer than {LONGEST} characters.")
    parser = _Parser(_tokens(text))
    if parser.next.kind == "end":
        return lambda entry: True
    passes = parser.all_of()
    if parser.next.kind != "end":
        raise _unparseable(parser.next)
    return passes


@lru_cache(maxsize=100_000)
def nanoseconds(text: str) -> int:
    """Parse an RFC 3339 time, or a date, to Unix nanoseconds. Raises ApiError 400."""
    moment = Timestamp()
    try:
        moment.FromJsonString(text if "T" in text else f"{text}T00:00:00Z")
    except ValueError as error:
        raise ApiError(400, f"Invalid timestamp: {text!r}") from error
    return int(moment.ToNanoseconds())


def _tokens(text: str) -> list[Token]:
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = TOKEN.match(text, at)
        if not match or match.lastgroup is None:
            rest = text[at:].lstrip()
            raise _unparseable(Token("?", rest[:1], len(text) - len(rest) + 1))
        raw = match[match.lastgroup]
        start = match.start(match.lastgroup) + 1
        said = re.sub(r"\\(.)", r"\1", raw[1:-1]) if match.lastgroup == "text" else raw
        tokens.append(Token(match.lastgroup, said, start))
        at = match.end()
    return [*tokens, Token("end", "", len(text) + 1)]


def _unparseable(token: Token) -> ApiError:
    said = f"Unparseable filter: syntax error at line 1, column {token.at}, token '{token.text}'"
    return ApiError(400, said)


class _Parser:
    """A recursive-descent parser. `next` is the first unread token."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    @property
    def next(self) -> Token:
        return self.tokens[0]

    def take(self, kind: str, *texts: str) -> Token | None:
        """Read the next token if it is one of those, else return None."""
        if self.next.kind != kind or (texts and self.next.text not in texts):
            return None
        return self.tokens.pop(0)

    def must(self, *kinds: str) -> Token:
        if self.next.kind not in kinds:
            raise _unparseable(self.next)
        return self.tokens.pop(0)

    def all_of(self) -> Test:
        tests = [self.any_of()]
        while self.take("word", "AND") or (self.next.kind != "end" and self.next.text != ")"):
            tests.append(self.any_of())
        return lambda entry: all(test(entry) for test in tests)

    def any_of(self) -> Test:
        tests = [self.one()]
        while self.take("word", "OR"):
            tests.append(self.one())
        return lambda entry: any(test(entry) for test in tests)

    def one(self) -> Test:
        if self.take("word", "NOT"):
            inner = self.one()
            return lambda entry: not inner(entry)
        if self.take("mark", "("):
            inner = self.all_of()
            if not self.take("mark", ")"):
                raise _unparseable(self.next)
            return inner
        return self.comparison()

    def comparison(self) -> Test:
        field, operator, value = self.must("word"), self.must("op").text, self.must("text", "word")
        if field.text.partition(".")[0] not in FIELDS or field.text in ("AND", "OR"):
            raise ApiError(400, f"Field not found: '{field.text}'.")
        if "-" in field.text.partition('"')[0]:
            raise _unparseable(field)
        return _comparison(field.text.replace('"', ""), operator, value)


def _comparison(field: str, operator: str, value: Token) -> Test:
    if field in TIMES:
        return _ordered(lambda entry: nanoseconds(entry[field]), operator, nanoseconds(value.text), value)
    if field == "severity":
        ranks = dict(log_severity_pb2.LogSeverity.items())
        if value.text not in ranks:
            raise ApiError(400, f"Invalid severity: {value.text!r}")
        return _ordered(lambda entry: ranks[entry["severity"]], operator, ranks[value.text], value)
    if operator == ":":
        wanted = "" if value.text == "*" else value.text.casefold()
        return lambda entry: _at(entry, field) is not None and wanted in str(_at(entry, field)).casefold()
    return _ordered(lambda entry: _text(_at(entry, field)), operator, value.text.casefold(), value)


def _ordered(of: Callable[[dict[str, Any]], Any], operator: str, right: Any, value: Token) -> Test:
    """Return a comparison with an entry's value. A missing value (None) is neither equal nor unequal."""
    if operator not in COMPARISONS:
        raise _unparseable(value)
    return lambda entry: (actual := of(entry)) is not None and COMPARISONS[operator](actual, right)


def _at(entry: dict[str, Any], field: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = entry
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str | None:
    """Return a text in lower case, as comparisons ignore case."""
    return None if value is None else str(value).casefold()


def rfc3339(nanos: int) -> str:
    """Format Unix nanoseconds as Google does: with 0, 3, 6 or 9 fractional digits."""
    moment = Timestamp()
    moment.FromNanoseconds(nanos)
    return str(moment.ToJsonString())


def of_seconds(seconds: float) -> int:
    """Convert Unix seconds to nanoseconds, with microsecond precision, the limit of a float."""
    return round(datetime.fromtimestamp(seconds, UTC).timestamp() * 1_000_000) * 1000

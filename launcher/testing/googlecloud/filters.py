"""The language of Google's list filters, as far as launch and gcloud use it: comparisons, adjacent or joined by AND.

Which fields can be compared, and how, differs between services. Other syntax is refused, never ignored
(https://cloud.google.com/logging/docs/view/logging-query-language).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from launcher.testing.googlecloud.wire import ApiError

Test = Callable[[Any], bool]
"""Returns whether an item matches."""

# Path parts with other characters than letters, digits and _ are quoted: labels."launch-run".
FIELD = r'[\w.*/%-]+(?<=\.)"[^"\\]+"|[\w.*/%-]+'
SIGN = r"<=|>=|!=|=|<|>|:|(?:eq|ne)(?=\s)"
COMPARISON = re.compile(rf'({FIELD})\s*({SIGN})\s*(?:"((?:[^"\\]|\\.)*)"|([\w.*/%-]+))(?=\s|$)')
ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LONGEST = 20_000


def compiled(text: str, compare: Callable[[str, str, str], Test]) -> Test:
    """Compile a filter. `compare` returns the test of a field's value, by an operator. Raises ApiError 400."""
    if len(text) > LONGEST:
        raise ApiError(400, f"The filter is longer than {LONGEST} characters.")
    tests: list[Test] = []
    unread = text.strip()
    while unread:
        match = COMPARISON.match(re.sub(r"^AND\s+", "", unread) if tests else unread)
        if not match:
            raise unparseable(unread)
        field, sign, quoted, word = match.groups()
        tests.append(compare(field, sign, word if quoted is None else re.sub(r"\\(.)", r"\1", quoted)))
        unread = match.string[match.end() :].lstrip()
    return lambda item: all(test(item) for test in tests)


def ordered(value_of: Callable[[Any], Any], sign: str, right: Any) -> Test:
    """Return a comparison with an item's value. A missing value (None) is neither equal nor unequal."""
    if sign not in ORDERS:
        raise unparseable(sign)
    return lambda item: (actual := value_of(item)) is not None and ORDERS[sign](actual, right)


def field_at(item: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    for name in path.split("."):
        item = item.get(name) if isinstance(item, Mapping) else None
    return item


def unparseable(text: str) -> ApiError:
    return ApiError(400, f"Unparseable filter: syntax error at {text[:80]!r}")

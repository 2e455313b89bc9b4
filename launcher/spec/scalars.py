"""The YAML 1.2 core schema: which plain texts are null, booleans and numbers (https://yaml.org/spec/1.2.2/, 10.3.2).

PyYAML's own table is YAML 1.1's: `1e-4` is text there, `no` is false, `017` is 15, `1:30` is 90, a date an object.
"""

from __future__ import annotations

import re

CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{sign + name: float(sign + "inf") for sign in ("", "+", "-") for name in (".inf", ".Inf", ".INF")},
}
NUMBER = re.compile(
    r"(?P<dec>[-+]?[0-9]+)|0o(?P<oct>[0-7]+)|0x(?P<hex>[0-9a-fA-F]+)|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
)
BASES = {"dec": 10, "oct": 8, "hex": 16}
MOST_DIGITS = 4000
"""Python refuses to parse integers above 4,300 digits."""


def resolve(text: str) -> bool | int | float | str | None:
    """The value of a plain (unquoted) scalar. An integer too long to count is infinite."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    match = NUMBER.fullmatch(text)
    if not match:
        return text
    base = BASES.get(match.lastgroup or "")
    if base is None:
        return float(text)
    digits = match[match.lastgroup or ""]
    if len(digits) > MOST_DIGITS:
        return float("-inf" if digits[0] == "-" else "inf")
    return int(digits, base)

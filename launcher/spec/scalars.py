"""Resolve plain scalars to null, booleans and numbers by the YAML 1.2 core schema.

Source: https://yaml.org/spec/1.2.2/, 10.3.2.
PyYAML follows YAML 1.1, where `1e-4` is text, `no` is false, `017` is 15, `1:30` is 90 and a date is an object.
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
MAX_DIGITS = 4000
"""Python refuses to parse integers above 4,300 digits."""


def resolve(text: str) -> bool | int | float | str | None:
    """Return the value of a plain (unquoted) scalar; infinity for an integer with more than MAX_DIGITS digits."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    match = NUMBER.fullmatch(text)
    if not match:
        return text
    base = BASES.get(match.lastgroup or "")
    if base is None:
        return float(text)
    digits = match[match.lastgroup or ""]
    if len(digits) > MAX_DIGITS:
        return float("-inf" if digits[0] == "-" else "inf")
    return int(digits, base)

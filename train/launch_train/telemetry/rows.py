"""Rows of metrics, as strict JSON can hold them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]


def plain(row: Mapping[str, Any]) -> Row:
    """A row that strict JSON can hold: numbers of other kinds become float, nan and infinities null, and `nonfinite`
    says which they are: nan, inf or -inf."""
    values = {key: _plain(value) for key, value in row.items()}
    lost = {key: str(float(row[key])) for key, value in values.items() if value is None and row[key] is not None}
    return {**values, **({"nonfinite": lost} if lost else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not hasattr(value, "__float__"):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else None


def whole(step: Any) -> int:
    """A step: also a number of numpy's, a tensor with one, or 3.0."""
    try:
        return int(step) if float(step).is_integer() and not isinstance(step, (str, bytes)) else operator.index(step)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"metrics.log: the step must be a whole number, not {step!r}") from None

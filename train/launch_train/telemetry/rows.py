"""Convert rows of metrics to strict JSON."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]


def plain(row: Mapping[str, Any]) -> Row:
    """Return a copy of a row that strict JSON can represent.

    Other numeric types become float. NaN and infinities become null, and the key `nonfinite` maps each of these names
    to nan, inf or -inf.
    """
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
    """Return a step as int; accepts numpy numbers, one-element tensors and 3.0. Raises TypeError."""
    try:
        return int(step) if float(step).is_integer() and not isinstance(step, (str, bytes)) else operator.index(step)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"metrics.log: the step must be a whole number, not {step!r}") from None

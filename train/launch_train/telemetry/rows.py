"""Convert rows of metrics to strict JSON."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from launch_train import runfolder

Row = dict[str, Any]


def plain_row(row: Mapping[str, Any]) -> Row:
    """Return a copy of a row that strict JSON can represent.

    Other numeric types become float. NaN and infinities become null, and the key `nonfinite` maps each of these names
    to nan, inf or -inf.
    """
    values = {key: _plain(value) for key, value in row.items()}
    lost = {key: str(float(row[key])) for key, value in values.items() if value is None and row[key] is not None}
    return {**values, **({"nonfinite": lost} if lost else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_row(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not hasattr(value, "__float__"):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else None


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the scalars of a row by tag: train/… for a step, eval/… for an evaluation, none for other events."""
    if "step" not in row or row.get("event", "eval") != "eval":
        return {}
    group = row.get("event", "train")
    numbers = {key: value for key, value in row.items() if type(value) in (int, float)}
    numbers |= {key: float(text) for key, text in runfolder.nonfinite(row).items()}
    return {f"{group}/{key}": float(value) for key, value in numbers.items() if key not in ("step", "time")}


def whole_step(step: Any) -> int:
    """Return a step as int; accepts numpy numbers, one-element tensors and 3.0. Raises TypeError."""
    try:
        return int(step) if float(step).is_integer() and not isinstance(step, (str, bytes)) else operator.index(step)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"metrics.log: the step must be a whole number, not {step!r}") from None

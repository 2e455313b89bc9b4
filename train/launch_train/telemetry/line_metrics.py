"""Read rows of metrics from lines of output by a regular expression (`run.metrics.regex` of a spec)."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any, Final

from launch_train.telemetry.rows import Row

LINE: Final = 2000
"""Longest line, in characters, that is searched: longer lines are not metrics."""

_ENDS: Final = re.compile(r"[\r\n]+")
"""A progress bar ends its lines with a carriage return."""


class LineMetrics:
    """Turns output into rows. `regex` has the group `step`; its other named groups are values."""

    def __init__(self, regex: str) -> None:
        self._pattern = re.compile(regex)
        self._rest = ""
        self._row: Row = {}

    def lines(self, data: bytes) -> list[str]:
        """Return the complete lines that `data` ends; an incomplete one waits for the rest."""
        *lines, self._rest = _ENDS.split(self._rest + data.decode(errors="replace"))
        self._rest = self._rest[: LINE + 1]
        return [line for line in lines if len(line) <= LINE]

    def rows(self, line: str) -> Iterator[Row]:
        """Yield the row of a line, if it is the first of its step or has values that the step's earlier lines lack.

        Lines of an earlier step are ignored: several ranks may print the same lines. A row has all values of its step
        so far, as readers take the last row of a step.
        """
        match = self._pattern.search(line)
        if not match:
            return
        values = {name: number for name, text in match.groupdict().items() if (number := _number(text)) is not None}
        step = values.pop("step", None)
        if step is None or not math.isfinite(step) or not values:
            return
        last = self._row.get("step", -math.inf)
        past = self._row if step == last else {}
        if step < last or values.keys() <= past.keys():
            return
        self._row = {"step": int(step), "time": time.time(), **values, **past}
        yield dict(self._row)


def _number(text: Any) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

"""Checkpoint interval: the configured one, or the one that loses the least time (Young's rule)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launch_train.common import contract
from launch_train.common.config import Checkpoint
from launch_train.common.text import format_duration

FIRST_SECONDS, LATEST_FIRST_SECONDS = 60.0, 300.0
"""Bounds of the time until a start's first checkpoint: until then a failure loses everything, and the cost of a save is
not known."""

FIRST_SAVES = 20
"""The first checkpoint comes after this many times its expected duration, so it costs at most 5 %."""

LEAST_SECONDS, MOST_SECONDS = 30.0, 3600.0
"""Bounds of `auto`. Below, a bucket would fill with checkpoints; above, a wrong estimate would cost too much."""

DEFAULT_MTBF_HOURS = 24.0
"""For a run that wasn't started by launch."""


@dataclass
class Interval:
    """Seconds between two saves, or from the start to the first one.

    `fixed` is the configured interval, None for `auto`, infinity for never. `mtbf` is the expected time between two
    interruptions of the run, in hours. `save_seconds` is the expected duration of the first save.
    """

    fixed: float | None
    mtbf: float = DEFAULT_MTBF_HOURS
    save_seconds: float = 0.0
    _measured: float = math.inf
    _reported: float = 0.0
    _saved: bool = False

    @property
    def seconds(self) -> float:
        seconds = self._measured if self.fixed is None else self.fixed
        if self._saved or self.fixed == math.inf:
            return seconds
        return min(seconds, LATEST_FIRST_SECONDS, max(FIRST_SECONDS, FIRST_SAVES * self.save_seconds))

    def update(self, cost: float, write: float, trained: float, interruptions: int) -> str | None:
        """Update the automatic interval by the cost of a save; return a line to print if it changed by much, else None.

        `cost`: seconds by which the save delayed training; `write`: seconds until it was durable; `trained`: seconds of
        training so far, with so many `interruptions`.
        """
        between = expected_between(self.mtbf, trained, interruptions)
        self._saved = True
        self._measured = min(MOST_SECONDS, max(LEAST_SECONDS, 2 * write, young_interval(cost, between)))
        if self.fixed is not None or 0.8 < self._reported / self._measured < 1.25:
            return None
        self._reported = self._measured
        return (
            f"checkpoint interval: {format_duration(self._measured)} (a save costs {cost:.2g} s; an interruption is "
            f"expected every {format_duration(between)}; Young's rule)"
        )


def from_settings(settings: Checkpoint, env: Mapping[str, str]) -> Interval:
    """Return the configured interval; `auto` uses the MTBF that launch expects of the machines."""
    presets = {"auto": None, "off": math.inf}
    fixed = presets[settings.minutes] if isinstance(settings.minutes, str) else settings.minutes * 60
    return Interval(fixed, float(env.get(contract.MTBF) or DEFAULT_MTBF_HOURS))


def young_interval(cost: float, between: float) -> float:
    """Return the seconds between saves that lose the least time: the square root of 2 x cost x between.

    `cost`: seconds by which a save delays training; `between`: seconds between interruptions.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    """
    return math.sqrt(2 * cost * between)


def expected_between(mtbf_hours: float, trained: float, interruptions: int) -> float:
    """Return the expected seconds between interruptions: the estimate for the machines, corrected by what this run has
    seen. The estimate weighs as much as one interruption."""
    return (mtbf_hours * 3600 + trained) / (1 + interruptions)

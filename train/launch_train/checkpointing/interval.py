"""How often to save: what the config says, or what loses least (Young's rule)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launch_train.common import contract
from launch_train.common.config import Checkpoint
from launch_train.common.text import span

FIRST_SECONDS = 60.0
"""`auto` has measured nothing yet: the first save comes after so long, and tells what one costs."""

LEAST_SECONDS, MOST_SECONDS = 30.0, 3600.0
"""Of `auto`. Below, a bucket holds more checkpoints than anyone wants; above, a wrong guess costs too much."""

DEFAULT_MTBF_HOURS = 24.0
"""Without word from launch: a run that was started by hand."""


@dataclass
class Interval:
    """Seconds between two saves. `fixed` is what the config says, None for `auto`, infinity for never; `mtbf` is what
    launch expects between two interruptions of the run, in hours."""

    fixed: float | None
    mtbf: float = DEFAULT_MTBF_HOURS
    _measured: float = FIRST_SECONDS
    _said: float = 0.0

    @property
    def seconds(self) -> float:
        return self._measured if self.fixed is None else self.fixed

    def learn(self, cost: float, write: float, trained: float, interruptions: int) -> str | None:
        """Set the automatic interval by a save that held training up by `cost` seconds and took `write` seconds beside
        it, in a run that was interrupted so often in `trained` seconds. A line when it changes by much."""
        between = expected_between(self.mtbf, trained, interruptions)
        self._measured = min(MOST_SECONDS, max(LEAST_SECONDS, 2 * write, young(cost, between)))
        if self.fixed is not None or 0.8 < self._said / self._measured < 1.25:
            return None
        self._said = self._measured
        return (
            f"a checkpoint every {span(self._measured)}: one costs {cost:.2g} s of training, and an interruption is "
            f"expected every {span(between)} (Young's rule)"
        )


def chosen(settings: Checkpoint, env: Mapping[str, str]) -> Interval:
    """As the config says; `auto` goes by what launch expects of the machines."""
    named = {"auto": None, "off": math.inf}
    fixed = named[settings.minutes] if isinstance(settings.minutes, str) else settings.minutes * 60
    return Interval(fixed, float(env.get(contract.MTBF) or DEFAULT_MTBF_HOURS))


def young(cost: float, between: float) -> float:
    """Seconds between saves that lose the least time, for a save that holds training up by `cost` seconds and
    interruptions that come every `between` seconds: the square root of 2 x cost x between.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
    """
    return math.sqrt(2 * cost * between)


def expected_between(mtbf_hours: float, trained: float, interruptions: int) -> float:
    """Seconds between interruptions: what is expected of the machines, corrected by what this run has seen. The
    expectation weighs as much as one interruption that was seen."""
    return (mtbf_hours * 3600 + trained) / (1 + interruptions)

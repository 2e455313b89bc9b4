"""`--preempt-after`: a rehearsal of what a preempted Spot job goes through, and the words about it.

Vertex AI starts a preempted job again as it was: the same request, job id and attempt, on other machines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from launch_train.common.contract import Exit
from launcher.text import exact_duration, listed, plural

if TYPE_CHECKING:
    from launcher.rehearsal.supervisor import Ended, Preemption
    from launcher.runs.metrics.results import Resumption


class Ran(Struct, frozen=True, kw_only=True):
    """How a job ended, and how it had ended when it was preempted (None: it wasn't): an exit code for each replica."""

    exit_codes: dict[str, int]
    preempted: dict[str, int] | None = None


class Preempted(Struct, frozen=True, kw_only=True):
    """A preemption in figures: after how many seconds, with what exit codes, and how the run went on."""

    after: float
    exit_codes: dict[str, int]
    went_on: Resumption

    @property
    def done(self) -> bool:
        """Whether all had ended well in spite of it, so that nothing was started again."""
        return not any(self.exit_codes.values())

    def text(self) -> str:
        """`after 15 s at step 152; on again behind step 152, 0 steps lost`."""
        when = f"after {exact_duration(self.after)}"
        if self.done:
            return f"{when}; all ended with 0 all the same, so the job was not started again"
        stopped, resumed, lost = self.went_on.stopped_at, self.went_on.resumed_from, self.went_on.lost
        if stopped is not None:
            when = f"{when} at step {stopped}"
        if resumed is None:
            return f"{when}; started again"
        told = "" if lost is None else f", {plural(lost, 'step')} lost"
        return f"{when}; on again {f'behind step {resumed}' if resumed > 0 else 'from the beginning'}{told}"

    def as_data(self) -> dict[str, Any]:
        """The same for `-o json`."""
        return {
            "after_seconds": self.after,
            "exit_codes": self.exit_codes,
            "stopped_at_step": self.went_on.stopped_at,
            "resumed_from_step": self.went_on.resumed_from,
            "steps_lost": self.went_on.lost,
        }


def run(start: Callable[[Preemption | None], Ended], after: float | None, *, builtin: bool = True) -> Ran:
    """Start a job; with `after` preempt it then, and start it again unless it was done. A script may save by itself,
    which only the trainer (`builtin`) can be known not to have done."""
    from launcher.rehearsal.supervisor import GRACE_SECONDS, Preemption

    if after is None:
        return Ran(exit_codes=start(None).codes)
    words = f"preempting now (SIGTERM, {GRACE_SECONDS:.0f} s, SIGKILL)"
    first = start(Preemption(after, lambda: say(words)))
    if first.preempted is None:
        what = "a replica failed" if any(first.codes.values()) else "the job ended"
        say(f"{what} before {exact_duration(after)} were over; the job was not preempted")
        return Ran(exit_codes=first.codes)
    say(f"all were gone after {first.preempted:.1f} s: {'; '.join(endings(first.codes, builtin))}")
    if not any(first.codes.values()):
        say("nothing is left to do; it is not started again")
        return Ran(exit_codes=first.codes, preempted=first.codes)
    say("starting again")
    return Ran(exit_codes=start(None).codes, preempted=first.codes)


def say(words: str) -> None:
    """A line on stderr; on a terminal, lines that fit it."""
    from launcher.cli.ui.plan_page import fitted

    for line in fitted(words, len("launch: ")).splitlines():
        print(f"launch: {line}", file=sys.stderr, flush=True)


def endings(codes: Mapping[str, int], builtin: bool) -> list[str]:
    """How the replicas ended, those that ended alike together, and what it means for the work."""
    alike: dict[int, list[str]] = {}
    for name, code in codes.items():
        alike.setdefault(code, []).append(name)
    return [f"{listed(names, 3)} {ending(code, builtin)}" for code, names in alike.items()]


def ending(code: int, builtin: bool) -> str:
    """What an exit code says of the work at a preemption."""
    if code == Exit.PREEMPTED:
        return f"exited with {code} (saved)"
    if code == 0:
        return "exited with 0 (done)"
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
    return f"{how} (nothing was saved)" if builtin else how

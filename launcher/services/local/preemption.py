"""`--preempt-after`: preempt a local run as Vertex AI preempts a Spot job, and report how it resumed.

Vertex AI restarts a preempted job unchanged, on other machines: same request, job ID and attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from launch_train.common.contract import Exit
from launcher.services.local.supervisor import GRACE_SECONDS, Ended, Preemption, Say
from launcher.text import exact_duration, listed, plural

if TYPE_CHECKING:
    from launch_train.runfolder.starts import Resumption


class ReplicaExits(Struct, frozen=True, kw_only=True):
    """Replica -> exit code at the end, and at the preemption (None: not preempted)."""

    exit_codes: dict[str, int]
    preempted: dict[str, int] | None = None
    stopped: bool = False
    """The job was stopped, so it did not end by itself."""


class Preempted(Struct, frozen=True, kw_only=True):
    """A preemption: seconds after the start, exit codes, and how the run resumed."""

    after: float
    exit_codes: dict[str, int]
    resumption: Resumption

    @property
    def done(self) -> bool:
        """Return whether all replicas still succeeded, so that nothing was restarted."""
        return not any(self.exit_codes.values())

    def text(self) -> str:
        """Return `after 15 s at step 152; resumed from step 152; 0 steps lost`."""
        when = f"after {exact_duration(self.after)}"
        if self.done:
            return f"{when}; all processes still exited with 0, so the job was not restarted"
        stopped, resumed, lost = self.resumption.stopped_at, self.resumption.resumed_from, self.resumption.lost
        if stopped is not None:
            when = f"{when} at step {stopped}"
        if resumed is None:
            return f"{when}; restarted"
        loss = "" if lost is None else f"; {plural(lost, 'step')} lost"
        return f"{when}; {f'resumed from step {resumed}' if resumed > 0 else 'restarted from scratch'}{loss}"

    def as_data(self) -> dict[str, Any]:
        """Return the preemption for `-o json`."""
        return {
            "after_seconds": self.after,
            "exit_codes": self.exit_codes,
            "stopped_at_step": self.resumption.stopped_at,
            "resumed_from_step": self.resumption.resumed_from,
            "steps_lost": self.resumption.lost,
        }


def run(
    start: Callable[[Preemption | None], Ended], after: float | None, say: Say, *, builtin: bool = True
) -> ReplicaExits:
    """Run a job; with `after`, preempt it after that many seconds and restart it unless it succeeded.

    Only for the built-in trainer (`builtin`) does the exit code tell that nothing was saved.
    """
    if after is None:
        only = start(None)
        return ReplicaExits(exit_codes=only.codes, stopped=only.stopped)
    text = f"preempting the job (SIGTERM, then SIGKILL after {GRACE_SECONDS:.0f} s)"
    first = start(Preemption(after, lambda: say(text)))
    if first.stopped:
        return ReplicaExits(exit_codes=first.codes, stopped=True)
    if first.preempted is None:
        what = "a replica failed" if any(first.codes.values()) else "the job ended"
        say(f"{what} within {exact_duration(after)}; the job was not preempted")
        return ReplicaExits(exit_codes=first.codes)
    say(f"all processes exited after {first.preempted:.1f} s: {'; '.join(endings(first.codes, builtin))}")
    if not any(first.codes.values()):
        say("the job is complete; not restarting")
        return ReplicaExits(exit_codes=first.codes, preempted=first.codes)
    say("restarting")
    second = start(None)
    return ReplicaExits(exit_codes=second.codes, preempted=first.codes, stopped=second.stopped)


def endings(codes: Mapping[str, int], builtin: bool) -> list[str]:
    """Return how the replicas ended, grouped by exit code."""
    groups: dict[int, list[str]] = {}
    for name, code in codes.items():
        groups.setdefault(code, []).append(name)
    return [f"{listed(names, 3)} {ending(code, builtin)}" for code, names in groups.items()]


def ending(code: int, builtin: bool) -> str:
    """Return the meaning of an exit code at a preemption."""
    if code == Exit.PREEMPTED:
        return f"exited with {code} (checkpoint saved)"
    if code == 0:
        return "exited with 0 (done)"
    how = f"killed by signal {-code}" if code < 0 else f"exited with {code}"
    return f"{how} (no checkpoint saved)" if builtin else how

"""Decide what the outcomes of a generation mean: restart, or the end of the run. Pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from launch_train.common.contract import Exit
from launch_train.common.faults import Fault

_FINAL: Final = {
    Exit.SUPERSEDED: "another start of this run has taken over",
    Exit.USAGE: "invalid config or code; see the error above",
    Exit.DISAGREED: "the ranks' parameters or moments differ",
    Exit.TERMINAL: "an earlier attempt failed permanently",
    Exit.UNFIT: "unfit machine; see the error above",
}
"""Exit codes that a restart on the same machines can't change, most important first. Superseded comes first: the run
folder then belongs to another start, and nothing may be written to it."""

_TERMINAL: Final = (Exit.USAGE, Exit.DISAGREED)
"""Of these, the codes after which no platform may restart the run: they are written to `terminal`."""

_LAST_SIGNAL: Final = 64  # SIGRTMAX, see signal(7): 255 is no signal


@dataclass(frozen=True)
class Outcome:
    """The end of a generation on one node.

    `code`: exit code of the command (torchrun), negative for a signal. `marks`: codes that the processes wrote to their
    exit file. `signum`: signal that launch_train.node itself received, 0 for none. `note`: why the node ended the
    command, empty if it exited by itself. `faults`: exceptions that its processes failed with.
    """

    node: int
    code: int
    marks: tuple[int, ...] = ()
    signum: int = 0
    note: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def ok(self) -> bool:
        """The work is complete. After a signal only the processes' marks count, because many programs exit with 0 on
        SIGTERM. A process that saved and left (75) has work left, whatever its exit code."""
        if any(self.marks):
            return False
        return bool(self.marks) if self.signum or self.note else self.code == 0

    @property
    def preempted(self) -> bool:
        """The processes exited on request, after a durable save."""
        return Exit.PREEMPTED in self.marks

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        values = json.loads(text)
        faults = tuple(Fault(*fault) for fault in values["faults"])
        return cls(**{**values, "marks": tuple(values["marks"]), "faults": faults})

    def __str__(self) -> str:
        ended = f"exit code {self.code}" if self.code >= 0 else f"killed by {_signal_name(-self.code)}"
        return f"node {self.node}: {self.note or ended}"


@dataclass(frozen=True)
class End:
    """The end of the run on all nodes: exit code, reason in one line, and `terminal` if it is permanent."""

    code: int
    reason: str
    terminal: bool = False


def end_from_outcomes(outcomes: Sequence[Outcome]) -> End | None:
    """Return the run's end if the outcomes alone decide it: complete, stopped, or a failure that a restart can't
    fix."""
    bad = [outcome for outcome in outcomes if not outcome.ok]
    if not bad:
        return End(Exit.OK, "done")
    for code, reason in _FINAL.items():
        if marked := [outcome for outcome in bad if code in outcome.marks]:
            return End(code, f"node {marked[0].node}: {reason}", terminal=code in _TERMINAL)
    if end := _stopped(bad):
        return end
    for outcome in bad:
        for fault in outcome.faults:
            if fault.permanent and not outcome.note:  # the code can't be loaded: a restart would fail the same way
                return End(Exit.USAGE, f"node {outcome.node}: {fault}; not retrying", terminal=True)
    return None


def end_after_failure(
    outcomes: Sequence[Outcome],
    *,
    failures: int,
    restarts: int,
    failed_twice_early: bool = False,
    repeated: Fault | None = None,
) -> End | None:
    """Return the end of a run that has failed too often, or None to restart it.

    `failures`: failures since the last new checkpoint, this one included; `restarts`: how many of them may be repaired.
    `failed_twice_early`: the last two failed alike, at once and before their first step. `repeated`: the fault of both.
    """
    if repeated:
        reason = f"failed twice in the same way; not retrying: {repeated}"
    elif failures > restarts:
        count = "failed once" if failures == 1 else f"failed {failures} times"
        reason = f"{count} without a new checkpoint"
    elif failed_twice_early:
        reason = "failed twice before its first step; not retrying"
    else:
        return None
    # A command that exited by itself tells more than one that was stopped.
    bad = min((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.note != "")
    return End(Exit.FAILED, f"{bad}; {reason}", terminal=True)


def recurring_fault(before: Sequence[Outcome], now: Sequence[Outcome]) -> Fault | None:
    """Return the exception that two generations failed with at the same step and place; None if a restart may help."""
    if own_failure(before) is None or own_failure(now) is None:
        return None
    # Only the faults of nodes that failed by themselves: stopped processes may fail because of that.
    earlier, later = (
        [fault for outcome in outcomes if not outcome.note for fault in outcome.faults] for outcomes in (before, now)
    )
    known = {fault.recurring for fault in earlier} - {None}
    return next((fault for fault in later if fault.recurring in known), None)


def own_failure(outcomes: Sequence[Outcome]) -> int | None:
    """Return the exit code of the first node whose command failed by itself; None if there is none.

    None also if a signal ended one: it may come at any step (out of memory), buffered rows are lost with the process,
    and the failures of the others are its consequence.
    """
    codes = [outcome.code for outcome in outcomes if not outcome.ok and not outcome.note]
    # A signal is negative, or 128 + the signal of a subprocess, as torchrun and shells report it.
    has_signal = any(code < 0 or 128 < code <= 128 + _LAST_SIGNAL for code in codes)
    return None if has_signal else next(iter(codes), None)


def _stopped(bad: Sequence[Outcome]) -> End | None:
    """Return the end if the processes were interrupted: they saved and marked it, or a node received a signal.

    All ranks agree to save and leave, and the mark follows the durable save. So one mark on any node, even on one
    without a signal or one that was stopped with the others, means that the state is saved and the run waits for new
    machines. A rank that failed on its way out, or a node that went down before its report, doesn't change that.
    """
    if any(outcome.preempted for outcome in bad):
        return End(Exit.PREEMPTED, "interrupted; checkpoint saved")
    for outcome in bad:
        if outcome.signum:
            return End(128 + outcome.signum, f"node {outcome.node} received {_signal_name(outcome.signum)}")
    return None


def _signal_name(signum: int) -> str:
    names = {int(known): known.name for known in signal.Signals}
    return names.get(signum, f"signal {signum}")

"""What the end of a generation means: restart, or the end of the run. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from launch_train.common.contract import Exit
from launch_train.common.faults import Fault

_FINAL: Final = {
    Exit.SUPERSEDED: "another start of this run has taken over",
    Exit.USAGE: "the config or the code can't work (its own lines say why)",
    Exit.DISAGREED: "the ranks' parameters or moments differ",
    Exit.TERMINAL: "the run must not be started again",
    Exit.UNFIT: "the machine is not fit (its own lines say why)",
}
"""Codes that starting again on the same machines can't change, the most telling first. Superseded comes before all: the
run folder is another's then, and nothing may be written to it any more."""

_TERMINAL: Final = (Exit.USAGE, Exit.DISAGREED)
"""Of these, the ones after which no platform may start the run again: they are written to `terminal`."""

_LAST_SIGNAL: Final = 64  # SIGRTMAX, see signal(7): 255 is no signal


@dataclass(frozen=True)
class Outcome:
    """How a generation ended on one node.

    `code`: of the command (torchrun), negative for a signal. `marks`: what the processes wrote to their exit file.
    `signum`: the signal that launch_train.node itself got, 0 for none. `note`: why the command was ended from outside,
    empty if it ended by itself. `faults`: the exceptions that its processes failed with.
    """

    node: int
    code: int
    marks: tuple[int, ...] = ()
    signum: int = 0
    note: str = ""
    faults: tuple[Fault, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the work was done. After a signal only the processes' own word counts: many exit 0 when told to.

        And who says that it saved and left (75) has work left, whatever it exits with.
        """
        if any(self.marks):
            return False
        return bool(self.marks) if self.signum or self.note else self.code == 0

    @property
    def preempted(self) -> bool:
        """Whether the processes left because they were told to, after a durable save."""
        return Exit.PREEMPTED in self.marks

    def __str__(self) -> str:
        return f"node {self.node}: {self.note or _words(self.code)}"


@dataclass(frozen=True)
class End:
    """The end of the run on all nodes: the exit code, and why in one line; `terminal`: for good."""

    code: int
    reason: str
    terminal: bool = False


def decided(outcomes: Sequence[Outcome]) -> End | None:
    """The run's end where the outcomes alone say it: done, stopped, or what no other start can change."""
    bad = [outcome for outcome in outcomes if not outcome.ok]
    if not bad:
        return End(Exit.OK, "done")
    for code, words in _FINAL.items():
        if marked := [outcome for outcome in bad if code in outcome.marks]:
            return End(code, f"node {marked[0].node}: {words}", terminal=code in _TERMINAL)
    return _stopped(bad) or _impossible(bad)


def exhausted(
    outcomes: Sequence[Outcome], *, failures: int, restarts: int, hopeless: bool = False, again: Fault | None = None
) -> End | None:
    """The end of a run that has failed too often, or None for another generation.

    `failures` counts this one too, since the last durable step; `restarts` is how many of them may be repaired.
    `hopeless`: the last two failed alike, at once and before their first step. `again`: both failed with it.
    """
    bad = [outcome for outcome in outcomes if not outcome.ok]
    if again:
        return End(Exit.FAILED, f"{_first(bad)}; failed twice in the same way, not retrying: {again}", terminal=True)
    if failures > restarts:
        return End(Exit.FAILED, f"{_first(bad)}; {_count(failures)} without a new checkpoint", terminal=True)
    if hopeless:
        words = "failed twice before its first step: starting again can't help"
        return End(Exit.FAILED, f"{_first(bad)}; {words}", terminal=True)
    return None


def recurring(before: Sequence[Outcome], now: Sequence[Outcome]) -> Fault | None:
    """The exception that two generations failed with at the same step and place; None if a restart may help."""
    if own_failure(before) is None or own_failure(now) is None:
        return None
    known = {fault.recurring for fault in _own_faults(before)} - {None}
    return next((fault for fault in _own_faults(now) if fault.recurring in known), None)


def _own_faults(outcomes: Sequence[Outcome]) -> list[Fault]:
    """Of the nodes that failed by themselves: processes that were stopped may fail for that."""
    return [fault for outcome in outcomes if not outcome.note for fault in outcome.faults]


def own_failure(outcomes: Sequence[Outcome]) -> int | None:
    """Exit code of the first node whose command failed by itself; None if there is none.

    Nor where a signal ended one: it may come at any step (out of memory), rows that waited in memory are lost with the
    process, and what the others fail with then is no fault of theirs.
    """
    codes = [outcome.code for outcome in outcomes if not outcome.ok and not outcome.note]
    return None if any(map(_is_signal, codes)) else next(iter(codes), None)


def _stopped(bad: Sequence[Outcome]) -> End | None:
    """The end when the processes were stopped from outside: they saved and said so, or a node got a signal.

    All ranks agree to save and leave, and the mark comes after the save is durable: one mark on any node, also on one
    that got no signal itself or was stopped with the others a moment later, means that the run is safe and has to wait
    for new machines. A rank that broke on its way out, or a node that went down before it could report, changes nothing
    of that.
    """
    if any(outcome.preempted for outcome in bad):
        return End(Exit.PREEMPTED, "stopped from outside after saving")
    for outcome in bad:
        if outcome.signum:
            return End(128 + outcome.signum, f"node {outcome.node} got {_signal_name(outcome.signum)}")
    return None


def _impossible(bad: Sequence[Outcome]) -> End | None:
    """The end where the code can't be loaded: each restart would come to the same."""
    for outcome in bad:
        for fault in outcome.faults:
            if fault.permanent and not outcome.note:
                return End(Exit.USAGE, f"node {outcome.node}: {fault}; not retrying", terminal=True)
    return None


def _first(bad: Iterable[Outcome]) -> Outcome:
    """The outcome that says most: a command that ended by itself before one that was stopped."""
    return min(bad, key=lambda outcome: outcome.note != "")


def _count(failures: int) -> str:
    return "failed once" if failures == 1 else f"failed {failures} times"


def _is_signal(code: int) -> bool:
    """Of the command itself, or 128 + the signal of a process below it, as torchrun and shells say it."""
    return code < 0 or 128 < code <= 128 + _LAST_SIGNAL


def _words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"


def _signal_name(signum: int) -> str:
    names = {int(known): known.name for known in signal.Signals}
    return names.get(signum, f"signal {signum}")

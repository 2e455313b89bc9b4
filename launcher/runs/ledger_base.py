"""Where a run's attempts are noted: what every way to note them can do, and the way without a run folder."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from launcher.clock import REAL, Clock
from launcher.diagnosis import Diagnosis
from launcher.plan.binding import Stored, digest
from launcher.plan.model import Plan
from launcher.runs.attempts import Entry, EntryEnd, prevails


class Facts(Struct, frozen=True, kw_only=True):
    """What a lock says of the attempt that is about to be made. `spec` is a hash of the whole spec."""

    number: int
    round: int
    region: str
    zone: str | None
    provisioning: str
    machine: str
    identity: str
    spec: str = ""


class Lock(Struct, frozen=True, kw_only=True):
    """The lock's object. `writer` makes its content unlike any other's: by that a create whose answer was lost is
    known again as one's own."""

    round: int
    region: str
    zone: str | None
    provisioning: str
    machine: str
    identity: str
    writer: str
    time: float
    spec: str = ""


class Ledger(Protocol):
    """Where attempts are noted."""

    @property
    def locks(self) -> bool:
        """Whether it keeps launches apart that know nothing of each other."""

    def entries(self) -> tuple[Entry, ...]:
        """All attempts so far, in their order."""

    def lock(self, facts: Facts) -> Entry | None:
        """The attempt, if it is ours alone now; None: somebody else has that number."""

    def note_job(self, number: int, name: str) -> None:
        """Note the job that came of an attempt."""

    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> EntryEnd:
        """Note how an attempt ended, and return what holds: what was noted before, unless this `prevails`."""

    def age(self, number: int) -> float:
        """Seconds since an attempt was locked, at least; by the bucket's clock."""

    def written(self, number: int) -> float | None:
        """When an attempt was locked: Unix seconds by Google's clock; None: that isn't known."""

    def since(self, moment: float) -> float:
        """Seconds since a moment of Google's clock, at least; 0 where that can't be known."""

    def holder(self, number: int) -> str:
        """The id of the job whose nodes have claimed an attempt; empty: none has."""

    def holders(self) -> Sequence[str]:
        """The ids of all jobs that have claimed an attempt, the newest claim last; none where that isn't seen."""

    def stored(self) -> Stored | None:
        """The plan that the newest launch has left."""

    def write_plan(self, plan: Plan) -> None:
        """Leave the plan and its spec beside the attempts."""

    def forgive(self) -> None:
        """Remove what forbids the run to start again."""


class MemoryLedger:
    """Without a run folder: the attempts of this process only, and no locks."""

    def __init__(self, clock: Clock = REAL, entries: Sequence[Entry] = ()) -> None:
        self._clock = clock
        self._entries = {entry.number: entry for entry in entries}
        self._locked = dict.fromkeys(self._entries, clock.now())  # at least as old as that
        self._plan: Plan | None = None

    @property
    def locks(self) -> bool:
        return False

    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for _, entry in sorted(self._entries.items()))

    def lock(self, facts: Facts) -> Entry | None:
        if facts.number in self._entries:
            return None
        self._locked[facts.number] = self._clock.now()
        return self._entries.setdefault(facts.number, entry_of(facts.number, lock_of(facts)))

    def note_job(self, number: int, name: str) -> None:
        if number in self._entries:
            self._entries[number] = replace(self._entries[number], job=name)

    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> EntryEnd:
        known, end = self._entries.get(number), end_of(diagnosis, state, billed, waited)
        if known is None:
            return end
        if known.end is None or prevails(end, known.end):
            known = self._entries[number] = replace(known, end=end)
        return known.end or end

    def age(self, number: int) -> float:
        now = self._clock.now()
        return now - self._locked.get(number, now)

    def written(self, number: int) -> float | None:
        return None

    def since(self, moment: float) -> float:
        return 0.0

    def holder(self, number: int) -> str:
        return ""

    def holders(self) -> Sequence[str]:
        return ()

    def stored(self) -> Stored | None:
        return Stored(self._plan, digest(self._plan)) if self._plan else None

    def write_plan(self, plan: Plan) -> None:
        self._plan = plan

    def forgive(self) -> None:
        """Nothing is there that could forbid anything."""


def lock_of(facts: Facts) -> Lock:
    """The lock's object, this launch's own. Its time is for people: by this machine's clock."""
    known = {name: getattr(facts, name) for name in facts.__struct_fields__ if name != "number"}
    return Lock(**known, writer=secrets.token_hex(8), time=time.time())


def entry_of(number: int, lock: Lock) -> Entry:
    """An attempt of which nothing but the lock is known."""
    known = {name: getattr(lock, name) for name in lock.__struct_fields__ if name != "spec"}
    return Entry(number=number, **known)


def end_of(diagnosis: Diagnosis, state: str | None, billed: float, waited: float) -> EntryEnd:
    """A diagnosis as the end of an attempt, now by this machine's clock."""
    known = {name: getattr(diagnosis, name) for name in diagnosis.__struct_fields__}
    return EntryEnd(**known, state=state, time=time.time(), billed=billed, waited=waited)

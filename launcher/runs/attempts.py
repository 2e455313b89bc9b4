"""A run's attempts so far, and which one follows: the decisions, as pure functions of data.

An attempt is a lock in the run folder (`Entry`) that one `launch` has written before its one create request. Attempts
go in rounds: a round tries every place of the plan at most until it has refused; a person who types the command again
after that begins another round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from launcher.diagnosis import Diagnosis, Kind, Scope
from launcher.jobs.job import ENDED, GONE
from launcher.plan.model import Attempt, Plan
from launcher.plan.waiting import MIN_WAIT

RETRIES: Final = 5
"""How often a place is tried again after something that passes."""
FIRST_WAIT, LONGEST_WAIT = 2.0, 60.0
"""Seconds: the bounds of the waits between such tries double from the one to the other."""
LONGEST_WISH: Final = 600.0
"""Seconds that a Retry-After is followed at most."""
RUN_ENDS: Final = frozenset({"succeeded", "user", "cancelled", "expired", "unknown"})
"""Ends of a job that are the run's: trying it elsewhere, or again, can't help or isn't wanted."""


class EntryEnd(Struct, frozen=True, kw_only=True):
    """How an attempt ended. `state` is the job's last; None: there was no job. `time` is by the writer's clock."""

    state: str | None
    kind: Kind
    scope: Scope
    cause: str
    fix: str = ""
    retry_after: float = 0.0
    time: float = 0.0
    billed: float = 0.0
    """Seconds from the job's start to its end, as far as they are known."""
    waited: float = 0.0
    """Seconds that the job waited for machines, as far as they are known."""
    zones: tuple[str, ...] = ()
    """Where there are machines, as far as what ended it says so."""

    @property
    def diagnosis(self) -> Diagnosis:
        """What it means."""
        return Diagnosis(
            scope=self.scope,
            kind=self.kind,
            cause=self.cause,
            fix=self.fix,
            retry_after=self.retry_after,
            zones=self.zones,
        )

    @property
    def ends_run(self) -> bool:
        """Whether nothing follows unless somebody asks for it. A refusal is none: no job has run."""
        return self.state is not None and self.kind in RUN_ENDS

    @property
    def passes(self) -> bool:
        """Whether the same place may do better in a moment. What was lost has said nothing about the place."""
        return self.scope == "transient" or self.kind == "lost"

    @property
    def stops(self) -> bool:
        """Whether no other place can do better."""
        return self.scope in ("permanent", "project") and not self.passes


def prevails(new: EntryEnd, noted: EntryEnd) -> bool:
    """Whether an end takes the place of one that was noted before.

    Who cancels a job notes why first, while the job still lives: that stays if it was cancelled. If it came to an end
    of its own all the same, that is the truth; so is any end of a job that landed after its attempt was given up for
    lost. Everything else stays as it was noted: others have acted upon it.
    """
    if new.state not in (*ENDED, GONE) or not is_provisional(noted):
        return False
    return noted.state is None or new.state not in ("CANCELLED", GONE)


def is_provisional(end: EntryEnd) -> bool:
    """Whether an end was noted before the job's own was known: it may yet be told anew."""
    return end.kind == "lost" if end.state is None else end.state not in ENDED


class Entry(Struct, frozen=True, kw_only=True):
    """One attempt, from its lock. `writer` is a random token of the launch that has it, `time` (Unix seconds) by that
    one's clock and for people only; `job` is a resource name."""

    number: int
    round: int
    region: str
    zone: str | None
    provisioning: str
    machine: str
    identity: str
    writer: str
    time: float
    job: str | None = None
    end: EntryEnd | None = None

    @property
    def is_open(self) -> bool:
        """Whether its end isn't known: there is none, or it was given up for lost and then its job was there."""
        return self.end is None or (self.job is not None and self.end.state is None and self.end.kind == "lost")

    @property
    def where(self) -> str:
        """Its zone, or its region where Google chooses the zone."""
        return self.zone or self.region

    @property
    def place(self) -> tuple[str, str | None, str]:
        """Where, and with which provisioning model."""
        return self.region, self.zone, self.provisioning


class Next(NamedTuple):
    """The attempt that follows, after a pause in seconds; None: no place is left."""

    attempt: Attempt | None
    pause: float = 0.0


def next_attempt(plan: Plan, tries: Sequence[Entry], chance: float = 1.0) -> Next:
    """The first attempt of the plan's order that nothing in this round's tries speaks against; none where they have
    used up `limits.wait_total`.

    A try that had machines and lost them (preempted) wipes out what was said before: the places are as good as new.
    `chance` (0 to 1) is how much of a pause's bound is waited: full jitter, so that many launches spread out.
    """
    ended = [one for one in tries if one.end is not None]
    if (ended and ended[-1].end and ended[-1].end.stops) or is_waited_out(plan, tries):
        return Next(None)
    since = max((n + 1 for n, one in enumerate(ended) if one.end and one.end.kind == "preempted"), default=0)
    left = [attempt for attempt in plan.attempts if not is_closed(attempt, ended[since:])]
    better = (attempt for attempt in left if is_named(attempt, ended) or is_elsewhere(attempt, ended))
    found = next(better, None) or next(iter(left), None)
    return Next(found, pause(found, ended, chance) if found else 0.0)


def wait_left(plan: Plan, tries: Sequence[Entry]) -> float | None:
    """Return the seconds of `limits.wait_total` that a round's tries have left; None: there is no such limit."""
    total = plan.limits.wait_total_seconds
    return None if total is None else total - sum(one.end.waited for one in tries if one.end)


def is_waited_out(plan: Plan, tries: Sequence[Entry]) -> bool:
    """Return whether too little of `limits.wait_total` is left for another attempt."""
    left = wait_left(plan, tries)
    return left is not None and left < MIN_WAIT


def is_named(attempt: Attempt, ended: Sequence[Entry]) -> bool:
    """Whether the last try was told that there are machines in the attempt's zone, as it asked for them."""
    last = ended[-1] if ended else None
    return bool(last and last.end and attempt.zone in last.end.zones and attempt.provisioning == last.provisioning)


def is_elsewhere(attempt: Attempt, ended: Sequence[Entry]) -> bool:
    """Whether the last try's VM was taken away, and the attempt is the same in another zone: where machines are wanted
    by others just now, the next one goes soon too."""
    last = ended[-1] if ended else None
    if last is None or last.end is None or last.end.kind != "preempted" or last.zone is None:
        return False
    return attempt.zone != last.zone and attempt.provisioning == last.provisioning


def is_closed(attempt: Attempt, tries: Sequence[Entry]) -> bool:
    """Whether a refusal covers the attempt's place, or it was tried again too often."""
    again = sum(one.place == place_of(attempt) for one in tries if one.end and one.end.passes)
    return again > RETRIES or any(covers(one, attempt) for one in tries)


def covers(tried: Entry, attempt: Attempt) -> bool:
    """Whether what one try ended with holds for the attempt too."""
    if tried.end is None or tried.end.passes or tried.region != attempt.region:
        return False
    same_model = tried.provisioning == attempt.provisioning
    match tried.end.scope:
        case "region+provisioning":
            return same_model
        case "zone":
            # What has run out there for one model may be had with another.
            scarce = tried.end.kind in ("stockout", "waited") and not same_model
            return tried.zone == attempt.zone and not scarce if tried.zone else same_model
        case _:
            return True


def place_of(attempt: Attempt) -> tuple[str, str | None, str]:
    """Where, and with which provisioning model; as an Entry's."""
    return attempt.region, attempt.zone, attempt.provisioning


def pause(found: Attempt, ended: Sequence[Entry], chance: float) -> float:
    """Seconds before a place is tried again that has just said something that passes; 0 for another place."""
    again = 0
    for one in reversed(ended):
        if one.end is None or not one.end.passes or one.place != place_of(found):
            break
        again += 1
    if not again or ended[-1].end is None:
        return 0.0
    bound: float = min(FIRST_WAIT * 2.0 ** (again - 1), LONGEST_WAIT)
    return max(chance * bound, min(ended[-1].end.retry_after, LONGEST_WISH))


def attempts_summary(tries: Sequence[Entry]) -> tuple[str, str]:
    """All that was tried, a line each with its cause; and what to do, each thing once."""
    ended = [(one, one.end) for one in tries if one.end is not None]
    lines = (f"  {one.number}. {place_text(one.region, one.zone, one.provisioning)}: {end.cause}" for one, end in ended)
    fixes = dict.fromkeys(end.fix for _, end in ended if end.fix)
    return "\n".join(lines), "\n".join(fixes)


def place_text(region: str, zone: str | None, provisioning: str) -> str:
    """A place in words: `us-central1, spot`."""
    return f"{zone or region}, {provisioning}"

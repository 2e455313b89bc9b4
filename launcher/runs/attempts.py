"""Choose a run's next attempt from its attempts so far. Pure functions.

An attempt is a lock in the run folder (`AttemptEntry`), written by a launch before it sends its one create request.
Attempts form rounds: a round tries each placement of the plan until it is refused. If the user repeats the command
after that, a new round begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from launcher.diagnosis import Diagnosis
from launcher.jobs.job import ENDED, GONE
from launcher.plan.model import Attempt, Plan
from launcher.plan.placement import MIN_WAIT

RETRIES: Final = 5
"""Retries of a placement after transient errors."""
FIRST_WAIT, LONGEST_WAIT = 2.0, 60.0
"""Bounds of the exponential backoff between these retries, in seconds."""
MAX_RETRY_AFTER: Final = 600.0
"""Upper bound in seconds for a service's Retry-After."""
RUN_ENDS: Final = frozenset({"succeeded", "user", "cancelled", "expired", "unknown"})
"""Kinds of a job's end that also end the run: another attempt can't help or isn't wanted."""


class AttemptEnd(Diagnosis, frozen=True, kw_only=True):
    """How an attempt ended. `state`: the job's last state; None: no job. `time`: by the writer's clock."""

    state: str | None
    time: float = 0.0
    billed: float = 0.0
    """Seconds from the job's start to its end; 0: unknown."""
    waited: float = 0.0
    """Seconds the job waited for machines; 0: unknown."""

    @property
    def ends_run(self) -> bool:
        """Return whether no attempt follows unless the user asks for one. Not after a refusal: no job ran."""
        return self.state is not None and self.kind in RUN_ENDS

    @property
    def is_transient(self) -> bool:
        """Return whether a retry of the same placement may succeed. A lost attempt says nothing about it."""
        return self.scope == "transient" or self.kind == "lost"

    @property
    def stops(self) -> bool:
        """Return whether no other placement can succeed either."""
        return self.scope in ("permanent", "project") and not self.is_transient


def prevails(new: AttemptEnd, recorded: AttemptEnd) -> bool:
    """Return whether an end replaces the recorded one.

    A launch that cancels a job records the reason first, while the job still runs. That reason stays if the job was
    cancelled, and is replaced if the job ended in another way. An attempt recorded as lost gets the end of its job, if
    one appeared later. Everything else stays: other launches have acted on it.
    """
    if new.state not in (*ENDED, GONE) or not is_provisional(recorded):
        return False
    return recorded.state is None or new.state not in ("CANCELLED", GONE)


def is_provisional(end: AttemptEnd) -> bool:
    """Return whether an end was recorded before the job's own end was known, so that it may still change."""
    return end.kind == "lost" if end.state is None else end.state not in ENDED


class AttemptFacts(Struct, frozen=True, kw_only=True):
    """What a lock records of the attempt about to be submitted. `spec` is a hash of the whole spec."""

    round: int
    region: str
    zone: str | None
    provisioning: str
    machine: str
    identity: str
    spec: str = ""


class AttemptLock(AttemptFacts, frozen=True, kw_only=True):
    """The content of a lock. The random `writer` makes it unique, so a launch recognises its own lock even if the
    response to its write was lost. `time`: Unix seconds by that launch's clock, for people only."""

    writer: str
    time: float


class AttemptEntry(AttemptLock, frozen=True, kw_only=True):
    """One attempt. `job`: a resource name."""

    number: int
    job: str | None = None
    end: AttemptEnd | None = None
    exit_codes: Mapping[str, int] | None = None
    """On this machine: the exit code of each replica."""

    @property
    def is_open(self) -> bool:
        """Return whether its end is unknown: none is recorded, or it was recorded as lost and a job appeared later."""
        return self.end is None or (self.job is not None and self.end.state is None and self.end.kind == "lost")

    @property
    def where(self) -> str:
        """Return its zone, or its region where Google chooses the zone."""
        return self.zone or self.region

    @property
    def place(self) -> tuple[str, str | None, str, str]:
        """Return its placement: region, zone, provisioning model and machine type."""
        return self.region, self.zone, self.provisioning, self.machine


class NextAttempt(NamedTuple):
    """The next attempt, and the pause before it in seconds. None: no placement is left."""

    attempt: Attempt | None
    pause: float = 0.0


def next_attempt(plan: Plan, tries: Sequence[AttemptEntry], jitter: float = 1.0) -> NextAttempt:
    """Return the first attempt in the plan's fallback order that this round's `tries` don't rule out; none if they used
    up `limits.wait_total`.

    A preempted try had machines, so failures before it no longer count. `jitter` (0 to 1) is the fraction of the
    backoff that is waited: full jitter spreads out concurrent launches.
    """
    ended = [entry for entry in tries if entry.end is not None]
    last = ended[-1] if ended else None
    of_type = last and last.end and last.end.kind == "machine" and len(plan.machines) > 1
    if (last and last.end and last.end.stops and not of_type) or is_wait_used_up(plan, tries):
        return NextAttempt(None)
    since = max((n + 1 for n, entry in enumerate(ended) if entry.end and entry.end.kind == "preempted"), default=0)
    left = []
    for attempt in plan.attempts:
        place, tried = place_of(attempt), ended[since:]
        retries = sum(entry.place == place for entry in tried if entry.end and entry.end.is_transient)
        if retries <= RETRIES and not any(applies_to(entry, attempt) for entry in tried):
            left.append(attempt)
    chosen = next((attempt for attempt in left if is_preferred(attempt, ended)), None) or next(iter(left), None)
    return NextAttempt(chosen, pause(chosen, ended, jitter) if chosen else 0.0)


def wait_left(plan: Plan, tries: Sequence[AttemptEntry]) -> float | None:
    """Return the seconds of `limits.wait_total` that a round's tries have left; None: there is no such limit."""
    total = plan.limits.wait_total_seconds
    return None if total is None else total - sum(entry.end.waited for entry in tries if entry.end)


def is_wait_used_up(plan: Plan, tries: Sequence[AttemptEntry]) -> bool:
    """Return whether too little of `limits.wait_total` is left for another attempt."""
    left = wait_left(plan, tries)
    return left is not None and left < MIN_WAIT


def is_preferred(attempt: Attempt, ended: Sequence[AttemptEntry]) -> bool:
    """Return whether the last try's error named the attempt's zone as one with capacity for its provisioning model, or
    its VM was preempted in another zone: a new VM in a zone with high demand would soon be preempted too."""
    last = ended[-1] if ended else None
    if last is None or last.end is None or attempt.provisioning != last.provisioning:
        return False
    is_elsewhere = last.end.kind == "preempted" and last.zone not in (None, attempt.zone)
    return attempt.zone in last.end.zones or is_elsewhere


def applies_to(tried: AttemptEntry, attempt: Attempt) -> bool:
    """Return whether the end of one try also applies to the attempt."""
    if tried.end is None or tried.end.is_transient:
        return False
    if tried.end.stops:  # only a refusal of a machine type leaves another attempt
        return tried.machine == attempt.machine_type
    is_of_region = tried.end.scope == "region" and tried.end.kind != "machine"  # capacity and GPU quotas are by type
    if tried.region != attempt.region or (tried.machine != attempt.machine_type and not is_of_region):
        return False
    same_model = tried.provisioning == attempt.provisioning
    match tried.end.scope:
        case "region+provisioning":
            return same_model
        case "zone":
            # A zone without capacity for one provisioning model may have some for another.
            scarce = tried.end.kind in ("stockout", "waited") and not same_model
            return tried.zone == attempt.zone and not scarce if tried.zone else same_model
        case _:
            return True


def place_of(attempt: Attempt) -> tuple[str, str | None, str, str]:
    """Return an attempt's placement, comparable with `AttemptEntry.place`."""
    return attempt.region, attempt.zone, attempt.provisioning, attempt.machine_type


def pause(attempt: Attempt, ended: Sequence[AttemptEntry], jitter: float) -> float:
    """Return the seconds of backoff before a placement is retried after a transient error; 0 for another placement."""
    failures = 0
    for entry in reversed(ended):
        if entry.end is None or not entry.end.is_transient or entry.place != place_of(attempt):
            break
        failures += 1
    if not failures or ended[-1].end is None:
        return 0.0
    bound: float = min(FIRST_WAIT * 2.0 ** (failures - 1), LONGEST_WAIT)
    return max(jitter * bound, min(ended[-1].end.retry_after, MAX_RETRY_AFTER))


def attempts_summary(tries: Sequence[AttemptEntry]) -> tuple[str, str]:
    """Return the ended attempts, a line each with its cause; and the fixes, a line each."""
    ended = [(entry, entry.end) for entry in tries if entry.end is not None]
    lines = (
        f"  {entry.number}. {place_text(entry.region, entry.zone, entry.provisioning)}: {end.cause}"
        for entry, end in ended
    )
    fixes = dict.fromkeys(end.fix for _, end in ended if end.fix)
    return "\n".join(lines), "\n".join(fixes)


def place_text(region: str, zone: str | None, provisioning: str) -> str:
    """Format a placement: `us-central1, spot`."""
    return f"{zone or region}, {provisioning}"

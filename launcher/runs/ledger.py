"""The ledger of a run's attempts in its folder: a lock, a job and an end for each.

    attempts/0002.json           the lock: only the launch that created it may send the one create request
    attempts/0002.job            the job that this request created
    attempts/0002.verdict.json   how the attempt ended

A create-only object decides between launches that know nothing of each other. All times that decide something are the
bucket's: a machine's clock may be a day off.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launch_train.common import contract
from launch_train.common.storage import OutputError, Storage
from launcher.clock import REAL, Clock
from launcher.diagnosis import Diagnosis
from launcher.gcp.api import status_of
from launcher.gcp.storage import explain_error, open_folder
from launcher.jobs.job import RESOURCE
from launcher.plan.binding import Stored, digest, read
from launcher.plan.model import Plan
from launcher.runs.attempts import AttemptEnd, AttemptEntry, is_provisional, prevails
from launcher.runs.logs.line import split_lines

T = TypeVar("T")

CLAIM = re.compile(rf"{contract.ATTEMPTS}/([0-9]{{4,18}})\.claim")
READERS: Final = 8
"""Objects read in parallel."""
LOCAL_ATTEMPT: Final = AttemptEntry(
    number=0,
    round=0,
    region="",
    zone=None,
    provisioning="",
    machine="",
    identity="",
    writer="",
    time=0.0,
    end=AttemptEnd(state=None, kind="lost", scope="transient", cause="not an attempt in the cloud"),
)
"""The entry for a lock in another format, which `launch local` wrote: it only takes a number."""


class AttemptFacts(Struct, frozen=True, kw_only=True):
    """The facts that a lock records of the attempt about to be submitted. `spec` is a hash of the whole spec."""

    number: int
    round: int
    region: str
    zone: str | None
    provisioning: str
    machine: str
    identity: str
    spec: str = ""


class LockRecord(Struct, frozen=True, kw_only=True):
    """The content of a lock. The random `writer` makes it unique, so a launch recognises its own lock even if the
    response to its write was lost."""

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
    """A record of a run's attempts."""

    @property
    def locks(self) -> bool:
        """Return whether its locks also exclude launches on other machines."""

    def entries(self) -> tuple[AttemptEntry, ...]:
        """Return all attempts so far, in order."""

    def lock(self, facts: AttemptFacts) -> AttemptEntry | None:
        """Lock an attempt's number for this launch, and return the attempt; None: another launch has that number."""

    def note_job(self, number: int, name: str) -> None:
        """Record the job that an attempt created."""

    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> AttemptEnd:
        """Record how an attempt ended, and return the end that is valid: an earlier record unless this `prevails`."""

    def lock_age(self, number: int) -> float:
        """Return the seconds since an attempt was locked, by the bucket's clock; a lower bound."""

    def locked_at(self, number: int) -> float | None:
        """Return when an attempt was locked, in Unix seconds by Google's clock; None: unknown."""

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since a time of Google's clock, as a lower bound; 0: unknown."""

    def claimed_by(self, number: int) -> str:
        """Return the id of the job whose nodes claimed an attempt; empty: none did."""

    def claiming_jobs(self) -> Sequence[str]:
        """Return the ids of all jobs that claimed an attempt, the newest claim last; empty if unknown."""

    def stored(self) -> Stored | None:
        """Return the plan that the newest launch stored."""

    def write_plan(self, plan: Plan) -> None:
        """Store the plan and its spec in the run folder."""

    def allow_restart(self) -> None:
        """Remove the marker that keeps the run's nodes from starting again."""


class BucketLedger:
    """The attempts in a run folder. If access is refused (403), it reports that once and continues as a MemoryLedger:
    the user who launches may lack write access that the job's service account has.

    All methods raise UsageError (the bucket does not exist or can't be used), NotAuthorised (credentials rejected) and
    UnreachableError (no answer until the timeout).
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock = REAL,
        say: Callable[[str], None] = lambda _line: None,
        *,
        project: str = "PROJECT",
        region: str = "REGION",
    ) -> None:
        """`project` and `region` are for the command in an error that creates a missing bucket."""
        self._storage = storage
        self._clock = clock
        self._say = say
        self._error_values = {"PROJECT": project, "REGION": region}
        self._memory: MemoryLedger | None = None
        self._cache: dict[str, bytes] = {}
        self._clock_offset: float | None = None
        self._is_new = False
        """The last list of attempts was empty."""

    @classmethod
    def open(
        cls, folder: str, clock: Clock = REAL, say: Callable[[str], None] = lambda _: None, **make: str
    ) -> BucketLedger:
        """Return the ledger of a run folder without reading it yet. Raises UsageError: the folder can't be used."""
        return cls(open_folder(folder), clock, say, **make)

    @property
    def locks(self) -> bool:
        """Return whether its locks also exclude launches on other machines: not after a 403."""
        return self._memory is None

    def entries(self) -> tuple[AttemptEntry, ...]:
        """Return all attempts so far, in order. Those of `launch local` count as ended."""
        return self._either(self._entries, lambda memory: memory.entries())

    def lock(self, facts: AttemptFacts) -> AttemptEntry | None:
        """Lock an attempt's number for this launch, and return the attempt; None: another launch has that number."""
        return self._either(lambda: self._lock(facts), lambda memory: memory.lock(facts))

    def note_job(self, number: int, name: str) -> None:
        """Record the job that an attempt created."""
        self._either(lambda: self._note_job(number, name), lambda memory: memory.note_job(number, name))

    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> AttemptEnd:
        """Record how an attempt ended, and return the end that is valid: an earlier record unless this `prevails`."""
        return self._either(
            lambda: self._note_end(number, end_of(diagnosis, state, billed, waited)),
            lambda memory: memory.note_end(number, diagnosis, state, billed, waited),
        )

    def lock_age(self, number: int) -> float:
        """Return the seconds since an attempt was locked, by the bucket's clock; a lower bound."""
        return self._either(
            lambda: self._now() - (self._locked_at(number) or 0.0), lambda memory: memory.lock_age(number)
        )

    def locked_at(self, number: int) -> float | None:
        """Return when an attempt was locked, in Unix seconds by the bucket's clock; None: unknown."""
        return self._either(lambda: self._locked_at(number), lambda memory: memory.locked_at(number))

    def seconds_since(self, moment: float) -> float:
        """Return the seconds since a time of Google's clock, as a lower bound; 0: unknown."""
        return self._either(lambda: max(0.0, self._now() - moment), lambda memory: memory.seconds_since(moment))

    def claimed_by(self, number: int) -> str:
        """Return the id of the job whose nodes claimed an attempt; empty: none did."""
        return self._either(lambda: self._claimed_by(number), lambda memory: memory.claimed_by(number))

    def claiming_jobs(self) -> Sequence[str]:
        """Return the ids of all jobs whose nodes claimed an attempt, the newest claim last."""
        return self._either(self._claiming_jobs, lambda memory: memory.claiming_jobs())

    def stored(self) -> Stored | None:
        """Return the plan that the newest launch stored; None: no plan, or one that this version can't read."""
        return self._either(lambda: read(self._content(contract.PLAN)), lambda memory: memory.stored())

    def write_plan(self, plan: Plan) -> None:
        """Store the plan and its spec in the run folder."""
        self._either(lambda: self._write_plan(plan), lambda memory: memory.write_plan(plan))

    def allow_restart(self) -> None:
        """Remove the marker that keeps the run's nodes from starting again."""
        self._either(lambda: self._storage.delete(contract.TERMINAL), lambda memory: memory.allow_restart())

    def _either(self, in_bucket: Callable[[], T], in_memory: Callable[[MemoryLedger], T]) -> T:
        """Call `in_bucket`, or `in_memory` once the bucket has refused access."""
        memory = self._memory
        if memory is None:
            try:
                return in_bucket()
            except OutputError as error:
                memory = self._fall_back(error)
        return in_memory(memory)

    def _fall_back(self, error: OutputError) -> MemoryLedger:
        """Continue in memory after a 403; raise any other error as a LaunchError."""
        if status_of(error) != 403:
            raise explain_error(error, self._error_values) from error
        known = sorted(int(found[1]) for name in self._cache if (found := contract.ATTEMPT_LOCK.match(name)))
        self._memory = MemoryLedger(self._clock, [self._entry(number) for number in known])
        self._say(f"{error};\nonly the look-up of jobs by their label prevents two jobs for this run")
        return self._memory

    def _entries(self) -> tuple[AttemptEntry, ...]:
        """List the objects once and read those that are new or may have changed."""
        names = self._storage.list(f"{contract.ATTEMPTS}/")
        numbers = sorted(int(found[1]) for name in names if (found := contract.ATTEMPT_LOCK.match(name)))
        self._is_new = not numbers
        parts = (contract.attempt_lock, contract.attempt_job, contract.attempt_verdict)
        unread = {part(number) for number in numbers for part in parts} & {*names} - {*self._cache}
        if unread:
            with ThreadPoolExecutor(READERS) as threads:
                contents = zip(unread, threads.map(self._content, unread), strict=True)
                self._cache.update((name, content) for name, content in contents if content)
        entries = tuple(map(self._entry, numbers))
        for entry in entries:
            if entry.end and is_provisional(entry.end):
                self._cache.pop(contract.attempt_verdict(entry.number), None)
        return entries

    def _entry(self, number: int) -> AttemptEntry:
        """Build an attempt from the cached objects."""
        record = decode_json(self._cache.get(contract.attempt_lock(number), b""), LockRecord)
        if record is None:
            return replace(LOCAL_ATTEMPT, number=number)
        name = json_field(self._cache.get(contract.attempt_job(number), b""), "name")
        end = decode_json(self._cache.get(contract.attempt_verdict(number), b""), AttemptEnd)
        if end:
            end = replace(end, cause=without_control_characters(end.cause), fix=without_control_characters(end.fix))
        return replace(entry_of_lock(number, record), job=name if RESOURCE.fullmatch(name) else None, end=end)

    def _claimed_by(self, number: int) -> str:
        return json_field(self._content(contract.claim(number)), "job")

    def _claiming_jobs(self) -> Sequence[str]:
        """Includes numbers beyond the newest lock: a job that was launched without a lock claims the next number."""
        names = self._storage.list(f"{contract.ATTEMPTS}/")
        numbers = sorted(int(found[1]) for name in names if (found := CLAIM.fullmatch(name)))
        return [job for job in map(self._claimed_by, numbers) if job]

    def _lock(self, facts: AttemptFacts) -> AttemptEntry | None:
        body = lock_of(facts)
        try:
            self._storage.write(contract.attempt_lock(facts.number), msgspec.json.encode(body), create=True)
        except FileExistsError:
            return None
        return entry_of_lock(facts.number, body)

    def _note_end(self, number: int, end: AttemptEnd) -> AttemptEnd:
        name, writer = contract.attempt_verdict(number), secrets.token_hex(8)
        content, version = as_json({**msgspec.to_builtins(end), "writer": writer}), ""
        while True:
            try:
                self._storage.swap(name, content, version)
                return end
            except FileExistsError:  # another launch recorded an end
                recorded, version = self._versioned(name)
            earlier = decode_json(recorded, AttemptEnd)
            if earlier and not prevails(end, earlier):
                return earlier

    def _note_job(self, number: int, name: str) -> None:
        self._storage.write(contract.attempt_job(number), as_json({"name": name}))

    def _write_plan(self, plan: Plan) -> None:
        """Write only what differs: several launches may do this at once, and an object takes one write a second. A new
        run has no plan yet."""
        text = msgspec.json.format(msgspec.json.encode(plan), indent=2)
        if self._is_new or self._content(contract.PLAN) != text:
            self._storage.write(contract.SPEC, as_yaml(plan.spec))
            self._storage.write(contract.PLAN, text)

    def _content(self, name: str) -> bytes:
        """Return an object's content; empty if it does not exist."""
        try:
            return self._storage.read(name)
        except FileNotFoundError:
            return b""

    def _versioned(self, name: str) -> tuple[bytes, str]:
        """Return the content and its version; both empty if the object doesn't exist."""
        try:
            return self._storage.read_version(name)
        except FileNotFoundError:
            return b"", ""

    def _locked_at(self, number: int) -> float | None:
        """None: the lock was deleted."""
        try:
            return self._storage.written(contract.attempt_lock(number))
        except FileNotFoundError:
            return None

    def _now(self) -> float:
        """Return the time by the bucket's clock, never ahead of it: the timestamp of an object written once, plus the
        time measured here since then."""
        if self._clock_offset is None:
            self._storage.write(contract.NOW, secrets.token_hex(8).encode())
            self._clock_offset = self._storage.written(contract.NOW) - self._clock.now()
        return self._clock.now() + self._clock_offset


class MemoryLedger:
    """A ledger without a run folder: it knows this process's attempts only and has no locks."""

    def __init__(self, clock: Clock = REAL, entries: Sequence[AttemptEntry] = ()) -> None:
        self._clock = clock
        self._entries = {entry.number: entry for entry in entries}
        self._locked_times = dict.fromkeys(self._entries, clock.now())  # an upper bound
        self._plan: Plan | None = None

    @property
    def locks(self) -> bool:
        return False

    def entries(self) -> tuple[AttemptEntry, ...]:
        return tuple(entry for _, entry in sorted(self._entries.items()))

    def lock(self, facts: AttemptFacts) -> AttemptEntry | None:
        if facts.number in self._entries:
            return None
        self._locked_times[facts.number] = self._clock.now()
        return self._entries.setdefault(facts.number, entry_of_lock(facts.number, lock_of(facts)))

    def note_job(self, number: int, name: str) -> None:
        if number in self._entries:
            self._entries[number] = replace(self._entries[number], job=name)

    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> AttemptEnd:
        entry, end = self._entries.get(number), end_of(diagnosis, state, billed, waited)
        if entry is None:
            return end
        if entry.end is None or prevails(end, entry.end):
            entry = self._entries[number] = replace(entry, end=end)
        return entry.end or end

    def lock_age(self, number: int) -> float:
        now = self._clock.now()
        return now - self._locked_times.get(number, now)

    def locked_at(self, number: int) -> float | None:
        return None

    def seconds_since(self, moment: float) -> float:
        return 0.0

    def claimed_by(self, number: int) -> str:
        return ""

    def claiming_jobs(self) -> Sequence[str]:
        return ()

    def stored(self) -> Stored | None:
        return Stored(self._plan, digest(self._plan)) if self._plan else None

    def write_plan(self, plan: Plan) -> None:
        self._plan = plan

    def allow_restart(self) -> None:
        """Do nothing: without a run folder no marker exists."""


def lock_of(facts: AttemptFacts) -> LockRecord:
    """Return the content of this launch's lock. Its time is by this machine's clock, for people only."""
    fields = {name: getattr(facts, name) for name in facts.__struct_fields__ if name != "number"}
    return LockRecord(**fields, writer=secrets.token_hex(8), time=time.time())


def entry_of_lock(number: int, record: LockRecord) -> AttemptEntry:
    """Return the attempt that a lock describes, without job and end."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__ if name != "spec"}
    return AttemptEntry(number=number, **fields)


def end_of(diagnosis: Diagnosis, state: str | None, billed: float, waited: float) -> AttemptEnd:
    """Return a diagnosis as the end of an attempt, now by this machine's clock."""
    fields = {name: getattr(diagnosis, name) for name in diagnosis.__struct_fields__}
    return AttemptEnd(**fields, state=state, time=time.time(), billed=billed, waited=waited)


def decode_json(text: bytes, kind: type[T]) -> T | None:
    """Decode JSON as `kind`; None if it does not match."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        return None


def without_control_characters(text: str) -> str:
    """Return `text` without control characters except line ends: it is shown, and others can write to the folder."""
    return "\n".join(split_lines(text))


def json_field(text: bytes, field: str) -> str:
    """Return one field of a JSON object as text; empty if it has none."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    return str(found.get(field, "")) if isinstance(found, dict) else ""


def as_json(content: Mapping[str, Any]) -> bytes:
    """Encode as JSON with sorted keys, so that equal content gives equal bytes."""
    return json.dumps(content, sort_keys=True).encode()


def as_yaml(spec: Mapping[str, Any]) -> bytes:
    """Encode a spec as YAML without aliases, which launch's reader refuses."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump(dict(spec), Dumper=Plain, sort_keys=False, allow_unicode=True)).encode()

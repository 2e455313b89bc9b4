"""The run folder's attempts, as those who launch keep them: one lock, one job and one end for each.

    attempts/0002.json           the lock: whoever created it, and nobody else, may send one create request
    attempts/0002.job            the job that came of it
    attempts/0002.verdict.json   how it ended, by whoever noted it first

Only a create-only object can decide between launches that know nothing of each other. All times that matter are the
bucket's own: a machine's clock may be a day off.
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
from launcher.runs.attempts import Entry, EntryEnd, is_provisional, prevails
from launcher.runs.logs.line import cut

T = TypeVar("T")

LOCK = re.compile(rf"{contract.ATTEMPTS}/(\d{{4,}})\.json")
CLAIM = re.compile(rf"{contract.ATTEMPTS}/(\d{{4,}})\.claim")
READERS: Final = 8
"""Objects that are read at once."""
NOT_OURS: Final = Entry(
    number=0,
    round=0,
    region="",
    zone=None,
    provisioning="",
    machine="",
    identity="",
    writer="",
    time=0.0,
    end=EntryEnd(state=None, kind="lost", scope="transient", cause="it was no attempt in the cloud"),
)
"""A lock that says nothing we understand: `launch local` wrote it. Its number is taken, and that is all."""


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


class BucketLedger:
    """The attempts in a run folder. Where access to it is refused (403), it goes on as a MemoryLedger and says so once:
    whoever launches need not be the one who may write there.

    All verbs raise UsageError (there is no such bucket, or it can't be used), NotAuthorised (the credentials are not
    accepted) and UnreachableError (no answer for as long as a call waits).
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
        """Project and region are for the command that makes a missing bucket."""
        self._storage = storage
        self._clock = clock
        self._say = say
        self._make = {"PROJECT": project, "REGION": region}
        self._memory: MemoryLedger | None = None
        self._read: dict[str, bytes] = {}
        self._ahead: float | None = None

    @classmethod
    def open(
        cls, folder: str, clock: Clock = REAL, say: Callable[[str], None] = lambda _: None, **make: str
    ) -> BucketLedger:
        """The ledger of a run folder; nothing is read yet. Raises UsageError: the folder can't be used."""
        return cls(open_folder(folder), clock, say, **make)

    @property
    def locks(self) -> bool:
        """Whether it keeps launches apart that know nothing of each other."""
        return self._memory is None

    def entries(self) -> tuple[Entry, ...]:
        """All attempts so far, in their order. One that `launch local` made has ended, wherever it is."""
        return self._either(self._entries, lambda memory: memory.entries())

    def lock(self, facts: Facts) -> Entry | None:
        """The attempt, if it is ours alone now; None: somebody else has that number."""
        return self._either(lambda: self._lock(facts), lambda memory: memory.lock(facts))

    def note_job(self, number: int, name: str) -> None:
        """Note the job that came of an attempt."""
        self._either(lambda: self._note_job(number, name), lambda memory: memory.note_job(number, name))

    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> EntryEnd:
        """Note how an attempt ended, and return what holds: what was noted before, unless this `prevails`."""
        return self._either(
            lambda: self._note_end(number, end_of(diagnosis, state, billed, waited)),
            lambda memory: memory.note_end(number, diagnosis, state, billed, waited),
        )

    def age(self, number: int) -> float:
        """Seconds since an attempt was locked, at least."""
        return self._either(lambda: self._now() - (self._written(number) or 0.0), lambda memory: memory.age(number))

    def written(self, number: int) -> float | None:
        """When an attempt was locked: Unix seconds by the bucket's clock; None: that isn't known."""
        return self._either(lambda: self._written(number), lambda memory: memory.written(number))

    def since(self, moment: float) -> float:
        """Seconds since a moment of Google's clock, at least; 0 where that can't be known."""
        return self._either(lambda: max(0.0, self._now() - moment), lambda memory: memory.since(moment))

    def holder(self, number: int) -> str:
        """The id of the job whose nodes have claimed an attempt; empty: none has."""
        return self._either(lambda: self._holder(number), lambda memory: memory.holder(number))

    def holders(self) -> Sequence[str]:
        """The ids of all jobs whose nodes have claimed an attempt, the newest claim last."""
        return self._either(self._holders, lambda memory: memory.holders())

    def stored(self) -> Stored | None:
        """The plan that the newest launch has left; None: none, or one that this launch can't read."""
        return self._either(lambda: read(self._content(contract.PLAN)), lambda memory: memory.stored())

    def write_plan(self, plan: Plan) -> None:
        """Leave the plan and its spec beside the attempts."""
        self._either(lambda: self._write_plan(plan), lambda memory: memory.write_plan(plan))

    def forgive(self) -> None:
        """Remove what forbids the run to start again."""
        self._either(lambda: self._storage.delete(contract.TERMINAL), lambda memory: memory.forgive())

    def _either(self, there: Callable[[], T], here: Callable[[MemoryLedger], T]) -> T:
        """What the folder answers, or what this process knows by itself once the folder has refused it."""
        memory = self._memory
        if memory is None:
            try:
                return there()
            except OutputError as error:
                memory = self._refused(error)
        return here(memory)

    def _refused(self, error: OutputError) -> MemoryLedger:
        """Go on without the folder after a 403; raises the folder's error in launch's words otherwise."""
        if status_of(error) != 403:
            raise explain_error(error, self._make) from error
        known = sorted(int(found[1]) for name in self._read if (found := LOCK.fullmatch(name)))
        self._memory = MemoryLedger(self._clock, [self._entry(number) for number in known])
        self._say(f"{error}; so only the look-up of jobs by their label keeps two launches of this run apart")
        return self._memory

    def _entries(self) -> tuple[Entry, ...]:
        """From one list of names, and what they hold. What can't change isn't read again."""
        names = self._storage.list(f"{contract.ATTEMPTS}/")
        numbers = sorted(int(found[1]) for name in names if (found := LOCK.fullmatch(name)))
        parts = (contract.attempt_lock, contract.attempt_job, contract.attempt_verdict)
        wanted = {part(number) for number in numbers for part in parts} & {*names} - {*self._read}
        if wanted:
            with ThreadPoolExecutor(READERS) as threads:
                found_there = zip(wanted, threads.map(self._content, wanted), strict=True)
                self._read.update((name, content) for name, content in found_there if content)
        entries = tuple(map(self._entry, numbers))
        for entry in entries:
            if entry.end and is_provisional(entry.end):
                self._read.pop(contract.attempt_verdict(entry.number), None)
        return entries

    def _entry(self, number: int) -> Entry:
        """An attempt as it was read."""
        locked = decoded(self._read.get(contract.attempt_lock(number), b""), Lock)
        if locked is None:
            return replace(NOT_OURS, number=number)
        name = text_of(self._read.get(contract.attempt_job(number), b""), "name")
        end = decoded(self._read.get(contract.attempt_verdict(number), b""), EntryEnd)
        if end:
            end = replace(end, cause=fit(end.cause), fix=fit(end.fix))
        return replace(entry_of_lock(number, locked), job=name if RESOURCE.fullmatch(name) else None, end=end)

    def _holder(self, number: int) -> str:
        return text_of(self._content(contract.claim(number)), "job")

    def _holders(self) -> Sequence[str]:
        """Also beyond the newest lock: a job that was launched without one takes the next number."""
        names = self._storage.list(f"{contract.ATTEMPTS}/")
        numbers = sorted(int(found[1]) for name in names if (found := CLAIM.fullmatch(name)))
        return [job for job in map(self._holder, numbers) if job]

    def _lock(self, facts: Facts) -> Entry | None:
        body = lock_of(facts)
        try:
            self._storage.write(contract.attempt_lock(facts.number), msgspec.json.encode(body), create=True)
        except FileExistsError:
            return None
        return entry_of_lock(facts.number, body)

    def _note_end(self, number: int, end: EntryEnd) -> EntryEnd:
        name, writer = contract.attempt_verdict(number), secrets.token_hex(8)
        content, version = as_json({**msgspec.to_builtins(end), "writer": writer}), ""
        while True:
            try:
                self._storage.swap(name, content, version)
                return end
            except FileExistsError:  # noted by somebody else, maybe just now
                noted, version = self._versioned(name)
            there = decoded(noted, EntryEnd)
            if there and not prevails(end, there):
                return there

    def _note_job(self, number: int, name: str) -> None:
        self._storage.write(contract.attempt_job(number), as_json({"name": name}))

    def _write_plan(self, plan: Plan) -> None:
        """Only where it differs: of ten launches at once each wants to, and a bucket takes one write a second."""
        text = msgspec.json.format(msgspec.json.encode(plan), indent=2)
        if self._content(contract.PLAN) != text:
            self._storage.write(contract.SPEC, as_yaml(plan.spec))
            self._storage.write(contract.PLAN, text)

    def _content(self, name: str) -> bytes:
        """Empty if it isn't there."""
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

    def _written(self, number: int) -> float | None:
        """None: somebody has removed the lock."""
        try:
            return self._storage.written(contract.attempt_lock(number))
        except FileNotFoundError:
            return None

    def _now(self) -> float:
        """The bucket's clock, never ahead of it: the time of an object that had just been written, and what has gone
        by here since that answer."""
        if self._ahead is None:
            self._storage.write(contract.NOW, secrets.token_hex(8).encode())
            self._ahead = self._storage.written(contract.NOW) - self._clock.now()
        return self._clock.now() + self._ahead


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
        return self._entries.setdefault(facts.number, entry_of_lock(facts.number, lock_of(facts)))

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


def entry_of_lock(number: int, lock: Lock) -> Entry:
    """An attempt of which nothing but the lock is known."""
    known = {name: getattr(lock, name) for name in lock.__struct_fields__ if name != "spec"}
    return Entry(number=number, **known)


def end_of(diagnosis: Diagnosis, state: str | None, billed: float, waited: float) -> EntryEnd:
    """A diagnosis as the end of an attempt, now by this machine's clock."""
    known = {name: getattr(diagnosis, name) for name in diagnosis.__struct_fields__}
    return EntryEnd(**known, state=state, time=time.time(), billed=billed, waited=waited)


def decoded(text: bytes, kind: type[T]) -> T | None:
    """JSON as data of that kind; None if it is none."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        return None


def fit(text: str) -> str:
    """Return `text` without control characters except line ends: it is shown, and others can write to the folder."""
    return "\n".join(cut(text))


def text_of(text: bytes, field: str) -> str:
    """One field of a JSON object; empty if there is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    return str(found.get(field, "")) if isinstance(found, dict) else ""


def as_json(content: Mapping[str, Any]) -> bytes:
    """JSON, always the same for the same content."""
    return json.dumps(content, sort_keys=True).encode()


def as_yaml(spec: Mapping[str, Any]) -> bytes:
    """A spec that `launch` reads again: without aliases, which its reader refuses."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump(dict(spec), Dumper=Plain, sort_keys=False, allow_unicode=True)).encode()

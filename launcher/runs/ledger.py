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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from launch_train import runfolder
from launch_train.common.storage import MemoryFolder, OutputError, Storage
from launcher.clock import REAL, Clock
from launcher.diagnosis import Diagnosis
from launcher.gcp.api import status_of
from launcher.gcp.storage import explain_error, open_folder
from launcher.jobs.job import ON_HOST, RESOURCE
from launcher.plan.binding import Stored, read
from launcher.plan.model import Plan
from launcher.runs.attempts import AttemptEnd, AttemptEntry, AttemptFacts, AttemptLock, is_provisional, prevails
from launcher.runs.logs.line import split_lines

P = ParamSpec("P")
T = TypeVar("T")

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


def continues_in_memory(
    method: Callable[Concatenate[Ledger, P], T],
) -> Callable[Concatenate[Ledger, P], T]:
    """Let a method continue in memory where the bucket refuses access (403), and raise any other error of the storage
    as a LaunchError."""

    @wraps(method)
    def call(ledger: Ledger, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return method(ledger, *args, **options)
        except OutputError as error:
            ledger.leave_bucket(error)
            return method(ledger, *args, **options)

    return call


class Ledger:
    """A run's attempts, in its folder.

    Without a folder, or once its bucket has refused access, the ledger is in memory: it knows this process's attempts
    only, and has no locks. The user who launches may lack the access that the job's service account has.

    All methods raise UsageError (the bucket does not exist or can't be used), NotAuthorised (credentials rejected) and
    UnreachableError (no answer until the timeout).
    """

    locks: bool
    """Its locks also exclude launches on other machines: not in memory."""

    def __init__(
        self,
        storage: Storage | None,
        clock: Clock = REAL,
        say: Callable[[str], None] = lambda _line: None,
        *,
        project: str = "PROJECT",
        region: str = "REGION",
    ) -> None:
        """`storage` is the run folder; None: the run has none. `project` and `region` are for the command in an error
        that creates a missing bucket."""
        self.locks = storage is not None
        self._storage = storage or MemoryFolder(clock.now)
        self._clock = clock
        self._say = say
        self._error_values = {"PROJECT": project, "REGION": region}
        self._cache: dict[str, bytes] = {}
        self._clock_offset: float | None = None
        self._is_new = False
        """The last list of attempts was empty."""
        self.closed = ""
        """Why the run must not be started here, by the last list of attempts; empty: it may be."""

    @classmethod
    def open(cls, folder: str, clock: Clock = REAL, say: Callable[[str], None] = lambda _: None, **make: str) -> Ledger:
        """Return the ledger of a run folder without reading it yet. Raises UsageError: the folder can't be used."""
        return cls(open_folder(folder), clock, say, **make)

    def leave_bucket(self, error: OutputError) -> None:
        """Continue in memory with what was read, after a 403, and report that; raise any other error as a
        LaunchError."""
        if status_of(error) != 403:
            raise explain_error(error, self._error_values) from error
        self.locks, self._storage, self._clock_offset = False, MemoryFolder(self._clock.now), None
        for name, content in self._cache.items():
            self._storage.write(name, content)
        self._say(f"{error};\nonly the look-up of jobs by their label prevents two jobs for this run")

    @continues_in_memory
    def entries(self) -> tuple[AttemptEntry, ...]:
        """Return all attempts so far, in order. Those of `launch local` count as ended.

        Lists the objects once and reads those that are new or may have changed.
        """
        names = self._storage.list(f"{runfolder.ATTEMPTS}/")
        numbers = sorted(int(match[1]) for name in names if (match := runfolder.ATTEMPT_LOCK.match(name)))
        self._is_new = not numbers
        self.closed = runfolder.closed_text(self._storage, names)
        parts = (runfolder.attempt_lock, runfolder.attempt_job, runfolder.attempt_verdict)
        unread = {part(number) for number in numbers for part in parts} & {*names} - {*self._cache}
        if unread:
            with ThreadPoolExecutor(READERS) as threads:
                contents = zip(unread, threads.map(self._content, unread), strict=True)
                self._cache.update((name, content) for name, content in contents if content)
        entries = []
        for number in numbers:
            end = decode_json(self._cache.get(runfolder.attempt_verdict(number), b""), AttemptEnd)
            if end:
                end = replace(end, cause=without_control_characters(end.cause), fix=without_control_characters(end.fix))
                if is_provisional(end):
                    del self._cache[runfolder.attempt_verdict(number)]
            lock = decode_json(self._cache.get(runfolder.attempt_lock(number), b""), AttemptLock)
            if lock is None:
                entries.append(replace(LOCAL_ATTEMPT, number=number))
                continue
            job = json_field(self._cache.get(runfolder.attempt_job(number), b""), "name")
            entries.append(
                AttemptEntry(
                    **asdict(lock),
                    number=number,
                    job=job if re.fullmatch(f"{RESOURCE}|{ON_HOST}", job) else None,
                    end=end,
                )
            )
        return tuple(entries)

    @continues_in_memory
    def lock(self, number: int, facts: AttemptFacts) -> AttemptEntry | None:
        """Lock an attempt's number for this launch, and return the attempt; None: another launch has that number."""
        lock = AttemptLock(**asdict(facts), writer=secrets.token_hex(8), time=time.time())
        name, content = runfolder.attempt_lock(number), msgspec.json.encode(lock)
        try:
            self._storage.write(name, content, create=True)
        except FileExistsError:
            return None
        self._cache[name] = content  # for the memory, if the bucket refuses the next write
        return AttemptEntry(**asdict(lock), number=number)

    @continues_in_memory
    def note_job(self, number: int, name: str) -> None:
        self._storage.write(runfolder.attempt_job(number), json.dumps({"name": name}).encode())

    @continues_in_memory
    def note_end(
        self, number: int, diagnosis: Diagnosis, state: str | None, billed: float = 0.0, waited: float = 0.0
    ) -> AttemptEnd:
        """Record how an attempt ended, and return the end that is valid: an earlier record unless this `prevails`."""
        end = AttemptEnd(**asdict(diagnosis), state=state, time=time.time(), billed=billed, waited=waited)
        name, writer, version = runfolder.attempt_verdict(number), secrets.token_hex(8), ""
        content = json.dumps({**msgspec.to_builtins(end), "writer": writer}, sort_keys=True).encode()
        while True:
            try:
                self._storage.swap(name, content, version)
                return end
            except FileExistsError:  # another launch recorded an end
                recorded, version = self._versioned(name)
            earlier = decode_json(recorded, AttemptEnd)
            if earlier and not prevails(end, earlier):
                return earlier

    @continues_in_memory
    def lock_age(self, number: int) -> float:
        """Return the seconds since an attempt was locked, by the bucket's clock; a lower bound."""
        return self._now() - (self._locked_at(number) or 0.0)

    @continues_in_memory
    def locked_at(self, number: int) -> float | None:
        """Return when an attempt was locked, in Unix seconds by the bucket's clock; None: unknown."""
        return self._locked_at(number) if self.locks else None

    @continues_in_memory
    def seconds_since(self, moment: float) -> float:
        """Return the seconds since a time of Google's clock, as a lower bound; 0: unknown."""
        return max(0.0, self._now() - moment) if self.locks else 0.0

    @continues_in_memory
    def claimed_by(self, number: int) -> str:
        """Return the id of the job whose nodes claimed an attempt; empty: none did, or it is unknown."""
        return json_field(self._content(runfolder.claim(number)), "job")

    @continues_in_memory
    def claiming_jobs(self) -> Sequence[str]:
        """Return the ids of all jobs whose nodes claimed an attempt, the newest claim last; empty if unknown.

        Includes numbers beyond the newest lock: a job that was launched without a lock claims the next number.
        """
        names = self._storage.list(f"{runfolder.ATTEMPTS}/")
        numbers = sorted(int(match[1]) for name in names if (match := runfolder.CLAIM.match(name)))
        return [job for job in map(self.claimed_by, numbers) if job]

    @continues_in_memory
    def stored(self) -> Stored | None:
        """Return the plan that the newest launch stored; None: no plan, or one that this version can't read."""
        return read(self._content(runfolder.PLAN))

    @continues_in_memory
    def write_plan(self, plan: Plan) -> None:
        """Store the plan and its spec in the run folder.

        Writes only what differs: several launches may do this at once, and an object takes one write a second. A new
        run has no plan yet.
        """
        from launcher.plan.yaml_text import as_yaml  # PyYAML, which most readers of a ledger don't need

        text = msgspec.json.format(msgspec.json.encode(plan), indent=2)
        if self._is_new or self._content(runfolder.PLAN) != text:
            self._storage.write(runfolder.SPEC, f"{as_yaml(plan.spec)}\n".encode())
            self._storage.write(runfolder.PLAN, text)

    @continues_in_memory
    def allow_restart(self) -> None:
        """Remove the marker that keeps the run's nodes from starting again."""
        self._storage.delete(runfolder.TERMINAL)

    def _content(self, name: str) -> bytes:
        """Return an object's content; empty if it does not exist."""
        return self._versioned(name)[0]

    def _versioned(self, name: str) -> tuple[bytes, str]:
        """Return the content and its version; both empty if the object doesn't exist."""
        try:
            return self._storage.read_version(name)
        except FileNotFoundError:
            return b"", ""

    def _locked_at(self, number: int) -> float | None:
        """None: the lock was deleted."""
        try:
            return self._storage.written(runfolder.attempt_lock(number))
        except FileNotFoundError:
            return None

    def _now(self) -> float:
        """Return the time by the bucket's clock, never ahead of it: the timestamp of an object written once, plus the
        time measured here since then."""
        if self._clock_offset is None:
            self._storage.write(runfolder.NOW, secrets.token_hex(8).encode())
            self._clock_offset = self._storage.written(runfolder.NOW) - self._clock.now()
        return self._clock.now() + self._clock_offset


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
        data = json.loads(text)
    except ValueError:
        return ""
    return str(data.get(field, "")) if isinstance(data, dict) else ""

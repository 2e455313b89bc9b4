"""The attempts of a run, in a bucket on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from launch_train import runfolder
from launch_train.common.storage import GcsFolder, LocalFolder
from launch_train.common.storage.retry import RetryClock
from launcher.clock import Clock
from launcher.diagnosis import Diagnosis
from launcher.errors import NotAuthorised, UnreachableError, UsageError
from launcher.plan.binding import digest
from launcher.plan.build import with_digest
from launcher.runs.attempts import AttemptEnd, AttemptFacts
from launcher.runs.ledger import Ledger
from launcher.services.local import attempts
from launcher.spec.reader import read
from launcher.testing.googlecloud import Bucket, FakeClock, Fault, GoogleCloud, Reset, Status
from tests.runs.submitting import DIGEST, plan_of

URL = "gs://my-bucket/runs/r-1"
INSERT = "storage.objects.insert"
NO = Diagnosis(scope="region", kind="stockout", cause="none left", fix="elsewhere", retry_after=3.0)
DONE = Diagnosis(scope="permanent", kind="succeeded", cause="done")


JOB = "projects/1/locations/us-central1/customJobs/7"
FACTS = AttemptFacts(round=1, region="us-central1", zone=None, provisioning="spot", machine="m", identity="i")


@pytest.fixture
def time(clock: FakeClock) -> Clock:
    """A machine whose clock is a day behind the bucket's."""
    return Clock(lambda: clock() - 86_400, clock.advance)


@pytest.fixture
def folder(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> GcsFolder:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return GcsFolder(URL, world=RetryClock(clock, clock.advance))


@pytest.fixture
def ledger(folder: GcsFolder, time: Clock) -> Ledger:
    return Ledger(folder, time)


@pytest.fixture(params=["bucket", "memory"])
def any_ledger(request: pytest.FixtureRequest, time: Clock) -> Ledger:
    """What holds for both."""
    return Ledger(None, time) if request.param == "memory" else request.getfixturevalue("ledger")


def test_an_attempt_from_its_lock_to_its_end(any_ledger: Ledger) -> None:
    assert any_ledger.entries() == ()
    entry = any_ledger.lock(1, FACTS)
    assert entry is not None
    assert (entry.number, entry.region, entry.job, entry.end, len(entry.writer)) == (1, "us-central1", None, None, 16)
    assert any_ledger.entries() == (entry,)
    assert any_ledger.lock(1, FACTS) is None, "the number is taken"
    any_ledger.note_job(1, JOB)
    end = any_ledger.note_end(1, NO, None)
    [found] = any_ledger.entries()
    assert (found.job, found.end) == (JOB, end)
    assert (end.kind, end.cause, end.fix, end.retry_after, end.state) == (NO.kind, NO.cause, NO.fix, 3.0, None)
    assert any_ledger.lock(2, FACTS) is not None
    assert [one.number for one in any_ledger.entries()] == [1, 2]


def test_the_first_end_holds(any_ledger: Ledger) -> None:
    any_ledger.lock(1, FACTS)
    first = any_ledger.note_end(1, NO, None)
    assert any_ledger.note_end(1, DONE, "SUCCEEDED") == first
    assert any_ledger.entries()[0].end == first


def test_an_end_recorded_while_the_job_was_active(any_ledger: Ledger) -> None:
    """Another launch gave it up, and died before it had cancelled it."""
    any_ledger.lock(1, FACTS)
    foretold = any_ledger.note_end(1, NO, "PENDING")
    assert any_ledger.entries()[0].end == foretold
    assert any_ledger.note_end(1, Diagnosis(scope="permanent", kind="cancelled", cause=""), "CANCELLED") == foretold
    assert any_ledger.note_end(1, DONE, "SUCCEEDED").kind == "succeeded"
    end = any_ledger.entries()[0].end
    assert end is not None
    assert end.kind == "succeeded"


def test_one_of_two_concurrent_ends_wins(folder: GcsFolder, time: Clock, clock: FakeClock) -> None:
    """Both have read the provisional end. The one that is second must see the first's, not write over it."""
    Ledger(folder, time).lock(1, FACTS)
    Ledger(folder, time).note_end(1, NO, "PENDING")
    other: list[AttemptEnd] = []

    class Late(GcsFolder):
        def read_version(self, name: str) -> tuple[bytes, str]:
            found = super().read_version(name)
            if not other:
                other.append(Ledger(folder, time).note_end(1, DONE, "SUCCEEDED"))
            return found

    failed = Diagnosis(scope="permanent", kind="user", cause="exit 1")
    held = Ledger(Late(URL, world=RetryClock(clock, clock.advance)), time).note_end(1, failed, "FAILED")
    [entry] = Ledger(folder, time).entries()
    assert entry.end == held == other[0]
    assert held.kind == "succeeded"


def test_ten_at_once_make_one_lock(folder: GcsFolder, time: Clock) -> None:
    with ThreadPoolExecutor(10) as threads:
        got = list(threads.map(lambda _: Ledger(folder, time).lock(1, FACTS), range(10)))
    [entry] = [one for one in got if one]
    assert Ledger(folder, time).entries() == (entry,)


def test_a_lock_with_a_lost_response_is_recognised(cloud: GoogleCloud, ledger: Ledger) -> None:
    cloud.faults.add(Fault(INSERT, Reset("after")))
    assert ledger.lock(1, FACTS) is not None
    assert ledger.lock(1, FACTS) is None


def test_ages_are_the_buckets(ledger: Ledger, clock: FakeClock) -> None:
    ledger.lock(1, FACTS)
    clock.advance(40)
    assert ledger.lock_age(1) == 40
    clock.advance(21)
    assert ledger.lock_age(1) == 61
    assert ledger.locked_at(1) == 1_700_000_000
    assert ledger.seconds_since(1_700_000_000) == 61
    assert ledger.seconds_since(1_800_000_000) == 0
    assert ledger.locked_at(9) is None


def test_the_bucket_is_asked_for_its_time_once(cloud: GoogleCloud, ledger: Ledger) -> None:
    ledger.lock(1, FACTS)
    before = len(cloud.requests)
    ledger.lock_age(1)
    assert len(cloud.requests) - before == 3
    ledger.lock_age(1)
    assert len(cloud.requests) - before == 4


def test_without_a_bucket_ages_are_this_processes(time: Clock, clock: FakeClock) -> None:
    any_ledger = Ledger(None, time)
    any_ledger.lock(1, FACTS)
    clock.advance(61)
    assert (
        any_ledger.lock_age(1),
        any_ledger.locked_at(1),
        any_ledger.seconds_since(0.0),
        any_ledger.claimed_by(1),
    ) == (61, None, 0.0, "")
    assert not any_ledger.locks
    assert any_ledger.note_end(5, NO, None).cause == NO.cause
    any_ledger.note_job(5, "nothing is known of it")
    any_ledger.allow_restart()
    assert len(any_ledger.entries()) == 1


def test_what_can_not_change_is_read_once(cloud: GoogleCloud, ledger: Ledger, folder: GcsFolder, time: Clock) -> None:
    for number in (1, 2):
        ledger.lock(number, FACTS)
        ledger.note_job(number, "a")
        ledger.note_end(number, NO, None)
    other = Ledger(folder, time)
    assert len(other.entries()) == 2
    before = len(cloud.requests)
    assert len(other.entries()) == 2
    assert len(cloud.requests) - before == 1, "the names alone"


def test_rehearsals_take_numbers_and_are_no_attempts(ledger: Ledger, folder: GcsFolder) -> None:
    attempts.lock(folder, {"region": "local", "job": "a fingerprint"})
    folder.write(runfolder.attempt_lock(2), b"{")
    found = ledger.entries()
    assert [(one.number, one.round, one.end and one.end.kind) for one in found] == [(1, 0, "lost"), (2, 0, "lost")]
    assert ledger.lock(3, FACTS) is not None
    assert attempts.newest_attempt(folder) == 3


def test_who_has_claimed_an_attempt(ledger: Ledger, folder: GcsFolder) -> None:
    assert ledger.claimed_by(1) == ""
    folder.write(runfolder.claim(1), json.dumps({"job": "77"}).encode())
    assert ledger.claimed_by(1) == "77"
    for text in (b"", b"[]", b"\xff", b"{"):
        folder.write(runfolder.claim(1), text)
        assert ledger.claimed_by(1) == ""


def test_the_plan_and_its_spec(cloud: GoogleCloud, ledger: Ledger, folder: GcsFolder, tmp_path: Path) -> None:
    plan = with_digest(plan_of(env={"A": "no", "B": "1e3"}), DIGEST)
    assert ledger.stored() is None
    ledger.write_plan(plan)
    stored = ledger.stored()
    assert stored is not None
    assert msgspec.json.encode(stored.plan) == msgspec.json.encode(plan)
    spec = tmp_path / "spec.yaml"
    spec.write_bytes(folder.read(runfolder.SPEC))
    assert read(spec).env == {"A": "no", "B": "1e3"}
    before = len(cloud.requests)
    ledger.write_plan(plan)
    assert len(cloud.requests) - before == 1, "it is there as it is"
    folder.write(runfolder.PLAN, b'{"run": 3}')
    assert ledger.stored() is None
    in_memory = Ledger(None)
    in_memory.write_plan(plan)
    assert in_memory.stored() == stored
    assert stored.digest == digest(plan)


def test_what_forbids_a_start_is_forgiven(ledger: Ledger, folder: GcsFolder) -> None:
    folder.write(runfolder.TERMINAL, b"because")
    ledger.allow_restart()
    ledger.allow_restart()
    assert runfolder.TERMINAL not in folder.list()


def test_a_bucket_that_is_not_there(folder: GcsFolder, time: Clock, clock: FakeClock) -> None:
    missing = GcsFolder("gs://not-there/runs/r", world=RetryClock(clock, clock.advance))
    with pytest.raises(UsageError) as told:
        Ledger(missing, time, project="my-project", region="us-east5").entries()
    assert told.value.hint == "gcloud storage buckets create gs://not-there --location=us-east5 --project=my-project"
    assert "bucket not-there does not exist" in told.value.problem


def test_a_bucket_without_an_answer(cloud: GoogleCloud, ledger: Ledger, clock: FakeClock) -> None:
    cloud.faults.down(clock() + 1000, Status(503))
    with pytest.raises(UnreachableError, match="is unreachable"):
        ledger.entries()


def test_credentials_that_are_refused(cloud: GoogleCloud, ledger: Ledger) -> None:
    cloud.faults.add(Fault("storage.*", Status(401), times=None))
    with pytest.raises(NotAuthorised):
        ledger.entries()


@pytest.fixture
def denied(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GcsFolder]]:
    """A folder of a bucket, for somebody who lacks these permissions."""
    with ExitStack() as stack:

        def made(*permissions: str) -> GcsFolder:
            bucket = Bucket("my-bucket", denied=frozenset(f"storage.objects.{verb}" for verb in permissions))
            cloud = stack.enter_context(GoogleCloud(clock=clock, buckets=(bucket,)))
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
            return GcsFolder(URL, world=RetryClock(clock, clock.advance))

        yield made


def test_without_bucket_access_the_ledger_stays_in_memory(denied: Callable[..., GcsFolder], time: Clock) -> None:
    said: list[str] = []
    ledger = Ledger(denied("create", "list", "get"), time, said.append)
    assert ledger.locks
    assert ledger.entries() == ()
    assert ledger.lock(1, FACTS) is not None
    assert ledger.lock_age(1) == 0
    ledger.note_job(1, JOB)
    assert (ledger.entries()[0].job, ledger.locks, ledger.claimed_by(1)) == (JOB, False, "")
    [line] = said
    assert "storage.objects.list" in line
    assert "only the look-up of jobs by their label" in line


def test_a_lock_counts_after_the_bucket_refuses_the_plan(cloud: GoogleCloud, folder: GcsFolder, time: Clock) -> None:
    """Who may create objects but not replace them: the attempt was locked, and is recorded as lost."""
    ledger = Ledger(folder, time)
    assert ledger.lock(1, FACTS) is not None
    cloud.faults.add(Fault(INSERT, Status(403), times=None))
    ledger.write_plan(with_digest(plan_of(), DIGEST))
    ledger.note_end(1, Diagnosis(scope="transient", kind="lost", cause="no job was created"), None)
    [entry] = ledger.entries()
    assert (entry.number, entry.end and entry.end.kind, ledger.locks) == (1, "lost", False)
    assert ledger.lock(2, FACTS) is not None
    assert ledger.note_end(2, NO, None).cause == NO.cause


def test_who_may_only_read_keeps_what_was_read(denied: Callable[..., GcsFolder], time: Clock, tmp_path: Path) -> None:
    said: list[str] = []
    folder = denied("create")
    ledger = Ledger(folder, time, said.append)
    local = Ledger(LocalFolder(tmp_path), time)
    local.lock(1, FACTS)
    ledger._cache = {runfolder.attempt_lock(1): (tmp_path / runfolder.attempt_lock(1)).read_bytes()}
    assert ledger.lock(2, FACTS) is not None
    assert [one.number for one in ledger.entries()] == [1, 2]
    assert "storage.objects.create" in said[0]


def test_a_local_folder_is_a_ledger_too(tmp_path: Path) -> None:
    ledger = Ledger.open(str(tmp_path))
    assert ledger.lock(1, FACTS) is not None
    assert 0 <= ledger.lock_age(1) < 60

"""The attempts of a run, in a bucket on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from launcher.clock import Clock
from launcher.diagnosis import Verdict
from launcher.errors import NotAuthorised, UsageError
from launcher.gcp.api import UnreachableError
from launcher.plan.binding import digest
from launcher.plan.build import with_digest
from launcher.rehearsal import attempts
from launcher.runs.ledger import EntryEnd, Ledger
from launcher.runs.ledger_base import Book, Facts, NoLedger
from launcher.spec.reader import read
from tests.googlecloud import Bucket, FakeClock, Fault, GoogleCloud, Reset, Status
from tests.runs.submitting import DIGEST, plan_of
from train import contract
from train.storage import GcsFolder, LocalFolder
from train.storage.patience import World

URL = "gs://my-bucket/runs/r-1"
INSERT = "storage.objects.insert"
NO = Verdict(scope="region", kind="stockout", cause="none left", fix="elsewhere", retry_after=3.0)
DONE = Verdict(scope="permanent", kind="succeeded", cause="done")


def facts(number: int = 1, **fields: object) -> Facts:
    known = {"round": 1, "region": "us-central1", "zone": None, "provisioning": "spot", "machine": "m", "identity": "i"}
    return Facts(**{"number": number, **known, **fields})  # type: ignore[arg-type]


@pytest.fixture
def time(clock: FakeClock) -> Clock:
    """A machine whose clock is a day behind the bucket's."""
    return Clock(lambda: clock() - 86_400, clock.advance)


@pytest.fixture
def folder(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> GcsFolder:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return GcsFolder(URL, world=World(clock, clock.advance))


@pytest.fixture
def ledger(folder: GcsFolder, time: Clock) -> Ledger:
    return Ledger(folder, time)


@pytest.fixture(params=["bucket", "memory"])
def book(request: pytest.FixtureRequest, time: Clock) -> Book:
    """What holds for both."""
    return NoLedger(time) if request.param == "memory" else request.getfixturevalue("ledger")


def test_an_attempt_from_its_lock_to_its_end(book: Book) -> None:
    assert book.entries() == ()
    entry = book.lock(facts())
    assert entry is not None
    assert (entry.number, entry.region, entry.job, entry.end, len(entry.writer)) == (1, "us-central1", None, None, 16)
    assert book.entries() == (entry,)
    assert book.lock(facts()) is None, "the number is taken"
    book.note_job(1, "projects/1/locations/us-central1/customJobs/7")
    end = book.note_end(1, NO, None)
    [found] = book.entries()
    assert (found.job, found.end) == ("projects/1/locations/us-central1/customJobs/7", end)
    assert (end.verdict, end.state) == (NO, None)
    assert book.lock(facts(2)) is not None
    assert [one.number for one in book.entries()] == [1, 2]


def test_the_first_end_holds(book: Book) -> None:
    book.lock(facts())
    first = book.note_end(1, NO, None)
    assert book.note_end(1, DONE, "SUCCEEDED") == first
    assert book.entries()[0].end == first


def test_an_end_that_was_noted_while_the_job_lived(book: Book) -> None:
    """Another launch gave it up, and died before it had cancelled it."""
    book.lock(facts())
    foretold = book.note_end(1, NO, "PENDING")
    assert book.entries()[0].end == foretold
    assert book.note_end(1, Verdict(scope="permanent", kind="cancelled", cause=""), "CANCELLED") == foretold
    assert book.note_end(1, DONE, "SUCCEEDED").kind == "succeeded"
    end = book.entries()[0].end
    assert end is not None
    assert end.kind == "succeeded"


def test_of_two_that_note_an_end_at_once_one_holds(folder: GcsFolder, time: Clock, clock: FakeClock) -> None:
    """Both have read the provisional end. The one that is second must see the first's, not write over it."""
    Ledger(folder, time).lock(facts())
    Ledger(folder, time).note_end(1, NO, "PENDING")
    other: list[EntryEnd] = []

    class Late(GcsFolder):
        def read_version(self, name: str) -> tuple[bytes, str]:
            found = super().read_version(name)
            if not other:
                other.append(Ledger(folder, time).note_end(1, DONE, "SUCCEEDED"))
            return found

    failed = Verdict(scope="permanent", kind="user", cause="exit 1")
    held = Ledger(Late(URL, world=World(clock, clock.advance)), time).note_end(1, failed, "FAILED")
    [entry] = Ledger(folder, time).entries()
    assert entry.end == held == other[0]
    assert held.kind == "succeeded"


def test_ten_at_once_make_one_lock(folder: GcsFolder, time: Clock) -> None:
    with ThreadPoolExecutor(10) as threads:
        got = list(threads.map(lambda _: Ledger(folder, time).lock(facts()), range(10)))
    [entry] = [one for one in got if one]
    assert Ledger(folder, time).entries() == (entry,)


def test_a_lock_whose_answer_was_lost_is_ones_own(cloud: GoogleCloud, ledger: Ledger) -> None:
    cloud.faults.add(Fault(INSERT, Reset("after")))
    assert ledger.lock(facts()) is not None
    assert ledger.lock(facts()) is None


def test_ages_are_the_buckets(ledger: Ledger, clock: FakeClock) -> None:
    ledger.lock(facts())
    clock.advance(40)
    assert ledger.age(1) == 40
    clock.advance(21)
    assert ledger.age(1) == 61
    assert ledger.written(1) == 1_700_000_000
    assert ledger.since(1_700_000_000) == 61
    assert ledger.since(1_800_000_000) == 0
    assert ledger.written(9) is None


def test_the_bucket_is_asked_for_its_time_once(cloud: GoogleCloud, ledger: Ledger) -> None:
    ledger.lock(facts())
    before = len(cloud.requests)
    ledger.age(1)
    assert len(cloud.requests) - before == 3
    ledger.age(1)
    assert len(cloud.requests) - before == 4


def test_without_a_bucket_ages_are_this_processes(time: Clock, clock: FakeClock) -> None:
    book = NoLedger(time)
    book.lock(facts())
    clock.advance(61)
    assert (book.age(1), book.age(2), book.written(1), book.since(0.0), book.holder(1)) == (61, 0, None, 0.0, "")
    assert not book.locks
    assert book.note_end(5, NO, None).verdict == NO
    book.note_job(5, "nothing is known of it")
    book.forgive()
    assert len(book.entries()) == 1


def test_what_can_not_change_is_read_once(cloud: GoogleCloud, ledger: Ledger, folder: GcsFolder, time: Clock) -> None:
    for number in (1, 2):
        ledger.lock(facts(number))
        ledger.note_job(number, "a")
        ledger.note_end(number, NO, None)
    other = Ledger(folder, time)
    assert len(other.entries()) == 2
    before = len(cloud.requests)
    assert len(other.entries()) == 2
    assert len(cloud.requests) - before == 1, "the names alone"


def test_rehearsals_take_numbers_and_are_no_attempts(ledger: Ledger, folder: GcsFolder) -> None:
    attempts.lock(folder, {"region": "local", "job": "a fingerprint"})
    folder.write(contract.attempt_lock(2), b"{")
    found = ledger.entries()
    assert [(one.number, one.round, one.end and one.end.kind) for one in found] == [(1, 0, "lost"), (2, 0, "lost")]
    assert ledger.lock(facts(3)) is not None
    assert attempts.newest(folder) == 3


def test_who_has_claimed_an_attempt(ledger: Ledger, folder: GcsFolder) -> None:
    assert ledger.holder(1) == ""
    folder.write(contract.claim(1), json.dumps({"job": "77"}).encode())
    assert ledger.holder(1) == "77"
    for text in (b"", b"[]", b"\xff", b"{"):
        folder.write(contract.claim(1), text)
        assert ledger.holder(1) == ""


def test_the_plan_and_its_spec(cloud: GoogleCloud, ledger: Ledger, folder: GcsFolder, tmp_path: Path) -> None:
    plan = with_digest(plan_of(env={"A": "no", "B": "1e3"}), DIGEST)
    assert ledger.stored() is None
    ledger.write_plan(plan)
    stored = ledger.stored()
    assert stored is not None
    assert msgspec.json.encode(stored.plan) == msgspec.json.encode(plan)
    spec = tmp_path / "spec.yaml"
    spec.write_bytes(folder.read(contract.SPEC))
    assert read(spec).env == {"A": "no", "B": "1e3"}
    before = len(cloud.requests)
    ledger.write_plan(plan)
    assert len(cloud.requests) - before == 1, "it is there as it is"
    folder.write(contract.PLAN, b'{"run": 3}')
    assert ledger.stored() is None
    book = NoLedger()
    book.write_plan(plan)
    assert book.stored() == (plan, digest(plan))


def test_what_forbids_a_start_is_forgiven(ledger: Ledger, folder: GcsFolder) -> None:
    folder.write(contract.TERMINAL, b"because")
    ledger.forgive()
    ledger.forgive()
    assert contract.TERMINAL not in folder.list()


def test_a_bucket_that_is_not_there(folder: GcsFolder, time: Clock, clock: FakeClock) -> None:
    missing = GcsFolder("gs://not-there/runs/r", world=World(clock, clock.advance))
    with pytest.raises(UsageError) as told:
        Ledger(missing, time, project="my-project", region="us-east5").entries()
    assert told.value.hint == "gcloud storage buckets create gs://not-there --location=us-east5 --project=my-project"
    assert "there is no bucket not-there" in told.value.problem


def test_a_bucket_without_an_answer(cloud: GoogleCloud, ledger: Ledger, clock: FakeClock) -> None:
    cloud.faults.down(clock() + 1000, Status(503))
    with pytest.raises(UnreachableError, match="can't be reached"):
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
            return GcsFolder(URL, world=World(clock, clock.advance))

        yield made


def test_who_may_not_use_the_bucket_goes_on_without(denied: Callable[..., GcsFolder], time: Clock) -> None:
    said: list[str] = []
    ledger = Ledger(denied("create", "list", "get"), time, said.append)
    assert ledger.locks
    assert ledger.entries() == ()
    assert ledger.lock(facts()) is not None
    assert ledger.age(1) == 0
    ledger.note_job(1, "a")
    assert (ledger.entries()[0].job, ledger.locks, ledger.holder(1)) == ("a", False, "")
    [line] = said
    assert "storage.objects.list" in line
    assert "only the look-up of jobs by their label" in line


def test_who_may_only_read_keeps_what_was_read(denied: Callable[..., GcsFolder], time: Clock, tmp_path: Path) -> None:
    said: list[str] = []
    folder = denied("create")
    ledger = Ledger(folder, time, said.append)
    local = Ledger(LocalFolder(tmp_path), time)
    local.lock(facts())
    ledger._read = {contract.attempt_lock(1): (tmp_path / contract.attempt_lock(1)).read_bytes()}
    assert ledger.lock(facts(2)) is not None
    assert [one.number for one in ledger.entries()] == [1, 2]
    assert "storage.objects.create" in said[0]


def test_a_local_folder_is_a_ledger_too(tmp_path: Path) -> None:
    ledger = Ledger.open(str(tmp_path))
    assert ledger.lock(facts()) is not None
    assert 0 <= ledger.age(1) < 60

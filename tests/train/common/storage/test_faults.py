"""The bucket's side of storage against everything that goes wrong between here and Cloud Storage."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from requests.adapters import HTTPAdapter

from launch_train.common.errors import OutputError
from launch_train.common.storage import GcsFolder, UnreachableError, retry
from launch_train.common.storage.retry import RetryClock
from launcher.testing.googlecloud import (
    Bucket,
    FakeClock,
    Fault,
    GoogleCloud,
    Reset,
    Stalled,
    Status,
    Torn,
    Truncated,
)
from launcher.testing.googlecloud.faults import Effect
from launcher.testing.googlecloud.storage.objects import draft
from tests.googlecloud.effects import KeepPart, LoseSession

INSERT, GET, LIST, DELETE = (f"storage.objects.{verb}" for verb in ("insert", "get", "list", "delete"))
SMALL, LARGE = b"small" * 100, os.urandom(1 << 20) * 9
"""One request, and a resumable upload."""


@pytest.fixture
def folder(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> GcsFolder:
    """On the cloud's clock, which waits move."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return GcsFolder("gs://my-bucket/runs/r-1", world=RetryClock(clock, clock.advance))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence is noticed at once."""
    monkeypatch.setattr(retry, "SILENCE_SECONDS", 0.15)


def stored(cloud: GoogleCloud, name: str) -> bytes:
    return cloud.objects.buckets["my-bucket"][f"runs/r-1/{name}"].data


USES: dict[str, Callable[[GcsFolder], object]] = {
    "create": lambda folder: folder.write("a", b"", create=True),
    "get": lambda folder: folder.read("a"),
    "list": lambda folder: folder.list(),
    "delete": lambda folder: folder.delete("a"),
}

PASSING: dict[str, Effect] = {
    **{str(code): Status(code) for code in (408, 429, 500, 502, 503, 504)},
    "reset before": Reset(),
    "reset after": Reset("after"),
    "stalled": Stalled(),
    "stalled after the head": Stalled("head"),
    "stalled half-way": Stalled("half"),
    "truncated": Truncated(),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("effect", PASSING.values(), ids=PASSING)
class TestWhatPasses:
    """Each verb, twice in a row."""

    def test_create(self, effect: Effect, folder: GcsFolder, cloud: GoogleCloud) -> None:
        fault = cloud.faults.add(Fault(INSERT, effect, times=2))
        version = folder.write("a", SMALL, create=True)
        assert (stored(cloud, "a"), folder.read_version("a")) == (SMALL, (SMALL, version))
        assert cloud.faults.used[fault] == 2

    def test_create_large(self, effect: Effect, folder: GcsFolder, cloud: GoogleCloud) -> None:
        faults = [cloud.faults.add(Fault(INSERT, effect, step=step)) for step in ("begin", "chunk")]
        folder.write("a", LARGE, create=True)
        assert stored(cloud, "a") == LARGE
        assert [cloud.faults.used[fault] for fault in faults] == [1, 1]

    def test_swap(self, effect: Effect, folder: GcsFolder, cloud: GoogleCloud) -> None:
        first = folder.write("a", b"first")
        fault = cloud.faults.add(Fault(INSERT, effect, times=2))
        second = folder.swap("a", b"second", first)
        assert folder.read_version("a") == (b"second", second)
        assert cloud.faults.used[fault] == 2

    def test_read(self, effect: Effect, folder: GcsFolder, cloud: GoogleCloud) -> None:
        version = folder.write("a", LARGE)
        fault = cloud.faults.add(Fault(GET, effect))
        assert folder.read_version("a") == (LARGE, version)
        assert cloud.faults.used[fault] == 1

    def test_list_and_delete(self, effect: Effect, folder: GcsFolder, cloud: GoogleCloud) -> None:
        folder.write("a", b"")
        folder.write("b", b"")
        faults = [cloud.faults.add(Fault(LIST, effect, times=2))]
        assert folder.list() == ["a", "b"]
        if not isinstance(effect, (Truncated, Stalled)):  # the answer to a deletion has no body
            faults.append(cloud.faults.add(Fault(DELETE, effect, times=2)))
        folder.delete("a")
        assert folder.list() == ["b"]
        assert all(cloud.faults.used[fault] == 2 for fault in faults)


def test_down_for_three_minutes(folder: GcsFolder, cloud: GoogleCloud, clock: FakeClock) -> None:
    began = clock()
    outage = cloud.faults.down(until=began + 180)
    with pytest.raises(UnreachableError, match=r"runs/r-1/a is unreachable, tried for 120 s: .*[Cc]onnection"):
        folder.write("a", b"1", create=True)
    assert 100 < clock() - began <= 120
    folder.within(300).write("a", b"1", create=True)
    assert began + 180 <= clock() <= began + 190
    assert stored(cloud, "a") == b"1"
    assert 15 < cloud.faults.used[outage] < 200, "neither a storm nor a single try"


def test_a_call_ends_within_its_time(folder: GcsFolder, cloud: GoogleCloud, clock: FakeClock) -> None:
    began = clock()
    cloud.faults.down(until=began + 1e6, effect=Status(503))
    for use in USES.values():
        began = clock()
        with pytest.raises(UnreachableError, match="tried for 15 s: We encountered an internal error"):
            use(folder.within(15))
        assert 5 < clock() - began <= 15


def test_retry_after_is_heeded(folder: GcsFolder, cloud: GoogleCloud, clock: FakeClock) -> None:
    cloud.faults.add(Fault(INSERT, Status(429, retry_after=40)))
    began = clock()
    folder.write("a", b"")
    assert 40 <= clock() - began < 41
    cloud.faults.add(Fault(GET, Status(503, retry_after=40)))
    with pytest.raises(UnreachableError):
        folder.within(30).read("a")
    assert clock() - began < 41, "it can't help to wait"


def test_no_request_may_outlast_its_call(
    folder: GcsFolder, cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the last ones, which began with much less time than the first."""
    given: list[tuple[float, float]] = []
    send = HTTPAdapter.send
    here = threading.get_ident()

    def watched(self: HTTPAdapter, request: Any, stream: bool, timeout: Any, *args: Any, **options: Any) -> Any:
        current = retry.CURRENT.get()
        if threading.get_ident() == here:  # another test's thread may still send, and real time passes for it
            given.append((max(timeout), current.left() if current else -1))
        return send(self, request, stream, timeout, *args, **options)

    monkeypatch.setattr(HTTPAdapter, "send", watched)
    cloud.faults.down(until=clock() + 1e6, effect=Status(503))
    for use in USES.values():
        with pytest.raises(UnreachableError):
            use(folder)
    assert len(given) > 40
    assert all(0 < timeout <= left for timeout, left in given)
    assert {round(timeout) for timeout, left in given} >= {30, 5}


def test_a_stalled_request_leaves_time_for_another(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real time: the connection's timeouts are what is left of the call."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    monkeypatch.setattr(retry, "SHORTEST_SECONDS", 0.1)
    quick = GcsFolder("gs://my-bucket/runs/r-1").within(1.5)
    fault = cloud.faults.add(Fault(INSERT, Stalled()))
    quick.write("a", b"1", create=True)
    cloud.faults.add(Fault(GET, Stalled("half"), times=None))
    began = time.monotonic()
    with pytest.raises(UnreachableError):
        quick.within(0.6).read("a")
    assert time.monotonic() - began < 10
    assert cloud.faults.used[fault] == 1


@pytest.mark.parametrize("theirs", [b"by him", b"by me!"])
def test_a_lost_request_may_meet_a_true_conflict(folder: GcsFolder, cloud: GoogleCloud, theirs: bytes) -> None:
    """The first try came to nothing, and another's write comes between."""

    def meanwhile(seconds: float) -> None:
        rival.write("LATEST", theirs, create=True)

    rival = GcsFolder(folder.url, world=RetryClock())
    mine = GcsFolder(folder.url, world=RetryClock(FakeClock(), meanwhile))
    cloud.faults.add(Fault(INSERT, Reset("before")))
    with pytest.raises(FileExistsError, match="LATEST exists, or has another version now"):
        mine.write("LATEST", b"by me.", create=True)
    assert stored(cloud, "LATEST") == theirs


def test_the_same_content_is_a_conflict_at_the_first_try(folder: GcsFolder) -> None:
    """Nothing of ours was on its way: who wrote it, wrote it."""
    folder.write("lock", b"same", create=True)
    with pytest.raises(FileExistsError):
        folder.write("lock", b"same", create=True)


def test_of_two_creators_with_lost_answers_one_wins(folder: GcsFolder, cloud: GoogleCloud) -> None:
    for number in range(20):
        cloud.faults.clear()
        cloud.faults.add(Fault(INSERT, Reset("after"), times=2))
        start = threading.Barrier(2)

        def create(who: int, number: int = number, start: threading.Barrier = start) -> bool:
            mine = GcsFolder(folder.url, world=RetryClock(time.monotonic, lambda _: None))
            start.wait()
            try:
                mine.write(f"lock-{number}", b"%d" % who, create=True)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            won = [*pool.map(create, (0, 1))]
        assert sorted(won) == [False, True]
        assert stored(cloud, f"lock-{number}") == b"%d" % won.index(True)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_flipped_bit_is_noticed(folder: GcsFolder, cloud: GoogleCloud, data: bytes) -> None:
    folder.write("a", data)
    faults = [cloud.faults.add(Fault(GET, Torn(at), step="media")) for at in (0, len(data) // 2, len(data) - 1)]
    assert folder.read("a") == data
    assert [cloud.faults.used[fault] for fault in faults] == [1, 1, 1]
    cloud.faults.add(Fault(GET, Torn(), times=None))
    with pytest.raises(UnreachableError, match="a is unreachable, tried for 3 s: Checksum mismatch"):
        folder.within(3).read("a")


def test_no_flipped_bit_in_an_answer_to_an_upload_is_believed(folder: GcsFolder, cloud: GoogleCloud) -> None:
    """Wherever the bit is: what is returned is the version that is there."""
    for at in range(0, 640, 9):
        cloud.faults.clear()
        fault = cloud.faults.add(Fault(INSERT, Torn(at)))
        version = folder.write(f"a{at}", b"1", create=True)
        assert cloud.faults.used[fault] == 1
        generation = cloud.objects.buckets["my-bucket"][f"runs/r-1/a{at}"].generation
        assert (at, len(version)) == (at, len(str(generation)))


def test_an_upload_that_is_damaged_on_its_way_is_refused_and_sent_again(
    folder: GcsFolder, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch_train.common.storage import client

    sent: list[int] = []
    send = client.TimeLimitAdapter.send

    def damaged(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        if request.method in ("POST", "PUT") and request.body and len(request.body) > 300 and not sent:
            sent.append(len(request.body))
            request.body = request.body[:-60] + bytes([request.body[-60] ^ 4]) + request.body[-59:]
        return send(self, request, *args, **options)

    monkeypatch.setattr(client.TimeLimitAdapter, "send", damaged)
    folder.write("a", SMALL, create=True)
    assert sent
    assert stored(cloud, "a") == SMALL


LOST: list[Effect] = [LoseSession(404), LoseSession(410), KeepPart(300_000), KeepPart(0)]


@pytest.mark.parametrize("effect", LOST, ids=str)
def test_a_resumable_upload_that_gets_lost_begins_anew(folder: GcsFolder, cloud: GoogleCloud, effect: Effect) -> None:
    fault = cloud.faults.add(Fault(INSERT, effect, times=2))
    folder.write("a", LARGE, create=True)
    assert stored(cloud, "a") == LARGE
    assert cloud.faults.used[fault] == 2


def test_an_upload_that_always_gets_lost_ends_in_words(folder: GcsFolder, cloud: GoogleCloud) -> None:
    cloud.faults.add(Fault(INSERT, KeepPart(300_000), times=None))
    with pytest.raises(OutputError, match="runs/r-1/a could not be uploaded, started 3 times"):
        folder.write("a", LARGE, create=True)


def test_a_large_file_goes_in_chunks_that_are_tried_again(
    folder: GcsFolder, cloud: GoogleCloud, tmp_path: Path
) -> None:
    data = os.urandom(1 << 20) * 70
    (tmp_path / "big").write_bytes(data)
    faults = [cloud.faults.add(Fault(INSERT, effect, step="chunk", after=1)) for effect in (Status(503), Reset())]
    folder.write_file("big", tmp_path / "big")
    assert stored(cloud, "big") == data
    assert [cloud.faults.used[fault] for fault in faults] == [1, 1]
    chunks = [request for request in cloud.requests if request.method == "PUT"]
    assert len(chunks) == 3 + 2, "three chunks, two of them twice"


def test_a_file_that_grows_meanwhile_is_sent_as_long_as_it_was(
    folder: GcsFolder, cloud: GoogleCloud, clock: FakeClock, tmp_path: Path
) -> None:
    (tmp_path / "log").write_bytes(b"1\n")

    def grow(seconds: float) -> None:
        with (tmp_path / "log").open("ab") as file:
            file.write(b"2\n")

    cloud.faults.add(Fault(INSERT, Status(503), times=2))
    GcsFolder(folder.url, world=RetryClock(clock, grow)).write_file("log", tmp_path / "log")
    assert stored(cloud, "log") == b"1\n"


def test_a_list_goes_over_all_pages(folder: GcsFolder, cloud: GoogleCloud) -> None:
    names = [f"m/{number:05d}" for number in range(2005)]
    for name in names:
        cloud.objects.write("my-bucket", draft(f"runs/r-1/{name}", b"", {}), {})
    fault = cloud.faults.add(Fault(LIST, Status(503), after=1, times=2))
    assert folder.list("m/") == names
    assert cloud.faults.used[fault] == 2
    pages = [request for request in cloud.requests if request.path.endswith("/o") and request.method == "GET"]
    assert len(pages) == 3 + 2, "a page that failed is asked for again, not all of them"


@pytest.mark.parametrize("verb", USES)
def test_no_permission_says_which_and_how_to_give_it(folder: GcsFolder, cloud: GoogleCloud, verb: str) -> None:
    folder.write("a", b"")
    cloud.objects.deny("my-bucket", f"storage.objects.{verb}")
    asked = len(cloud.requests)
    with pytest.raises(OutputError) as caught:
        USES[verb](folder)
    assert not isinstance(caught.value, UnreachableError)
    assert len(cloud.requests) == asked + 1, "it can't help to try again"
    text = str(caught.value)
    assert text.startswith("gs://my-bucket/runs/r-1")
    assert f" lacks the permission storage.objects.{verb}: gcloud storage buckets add-iam-policy-binding " in text
    assert text.endswith(" --role=roles/storage.objectUser")
    assert "\n" not in text


def test_who_lacks_the_permission_is_named(folder: GcsFolder, cloud: GoogleCloud) -> None:
    who = "trainer@my-project.iam.gserviceaccount.com"
    message = f"{who} does not have storage.objects.create access to the Google Cloud Storage object."
    cloud.faults.add(Fault(INSERT, Status(403, reason="forbidden", message=message)))
    with pytest.raises(OutputError, match=f": {who} lacks .* --member=serviceAccount:{who} --role"):
        folder.write("a", b"")


REFUSED: dict[str, tuple[Effect, str]] = {
    "401": (Status(401), "the credentials were rejected .*gcloud auth application-default login"),
    "403": (Status(403, message="Request is prohibited by policy."), "access denied: Request is prohibited by"),
    "400": (Status(400, reason="invalid", message="No."), "Cloud Storage rejected the request: No."),
}


@pytest.mark.parametrize("verb", USES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_not_tried_again(folder: GcsFolder, cloud: GoogleCloud, case: str, verb: str) -> None:
    effect, says = REFUSED[case]
    fault = cloud.faults.add(Fault("storage.*", effect, times=None))
    with pytest.raises(OutputError, match=says):
        USES[verb](folder)
    assert cloud.faults.used[fault] == 1


@pytest.mark.parametrize(("seconds", "days"), [(604_800, 7.0), (0, 0.0), (90 * 86_400, 90.0)])
def test_for_how_long_deleted_objects_are_billed(clock: FakeClock, seconds: int, days: float) -> None:
    with GoogleCloud(clock=clock, buckets=(Bucket("b", soft_delete_seconds=seconds),)) as cloud:
        folder = opened(cloud, clock)
        assert folder.soft_delete_days() == days
        cloud.objects.deny("b", "storage.buckets.get")
        assert folder.soft_delete_days() == 0
        cloud.faults.down(until=clock() + 1e6)
        assert folder.soft_delete_days() == 0


def opened(cloud: GoogleCloud, clock: FakeClock) -> GcsFolder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
        return GcsFolder("gs://b/x", world=RetryClock(clock, clock.advance))


def test_randomness_of_the_waits_is_not_the_process_own(folder: GcsFolder, cloud: GoogleCloud) -> None:
    """A run that is resumed exactly must draw the same numbers, whatever its network did."""
    cloud.faults.add(Fault(INSERT, Status(503), times=2))
    before = random.getstate()
    folder.write("a", b"")
    assert random.getstate() == before

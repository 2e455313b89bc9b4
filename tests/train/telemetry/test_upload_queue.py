from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import GcsFolder, LocalFolder, Storage, UnreachableError, retry
from launch_train.common.storage.retry import RetryClock
from launch_train.telemetry import upload_queue
from launch_train.telemetry.upload_queue import (
    Leftovers,
    Spool,
    SpoolEntry,
    new_folder,
    open_outbox,
    sweep_spools,
    taken_over,
)
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Stalled, Status

INSERT = "storage.objects.insert"
URL = "gs://my-bucket/runs/r-1"


class Bucket(LocalFolder):
    """A store that is not a local folder, as far as an outbox can tell, with an outage at will."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = URL
        self.trouble: Callable[[str], Exception | None] = lambda name: None
        self.asked: list[str] = []

    def write(self, name: str, data: Any, *, create: bool = False, crc32c: str = "") -> str:
        self._ask(name)
        return super().write(name, data, create=create, crc32c=crc32c)

    def write_file(self, name: str, path: Path) -> None:
        self._ask(name)
        super().write_file(name, path)

    def _ask(self, name: str) -> None:
        self.asked.append(name)
        if error := self.trouble(name):
            raise error


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def outbox(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spool]:
    monkeypatch.setattr(upload_queue, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(upload_queue, "LONGEST_WAIT", 0.05)
    made = Spool(bucket, new_folder(str(tmp_path / "spool"), URL))
    yield made
    bucket.trouble = lambda name: None
    made.close(10)


def away(name: str) -> Exception:
    return UnreachableError(f"{name} can't be reached")


def waited(condition: Callable[[], bool], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.005)
    return met


def test_what_is_put_arrives_in_order_and_leaves_nothing_behind(outbox: Spool, bucket: Bucket, tmp_path: Path) -> None:
    for number in range(100):
        outbox.put(f"m/{number:03d}", b"%d" % number)
    outbox.close(10)
    assert bucket.asked == bucket.list() == [f"m/{number:03d}" for number in range(100)]
    assert [bucket.read(name) for name in bucket.list()] == [b"%d" % number for number in range(100)]
    assert list((tmp_path / "spool").iterdir()) == []


def test_for_a_bucket_the_spool_is_where_the_environment_says(
    tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    for env, place in (({contract.SPOOL: str(tmp_path / "s" / "s")}, "s/s"), ({}, "t")):
        made = open_outbox(GcsFolder(URL), env)
        assert [path.name[:13] for path in (tmp_path / place).iterdir()] == ["launch-spool-"]
        made.put("a", place.encode())
        made.close(30)
        assert list((tmp_path / place).iterdir()) == []
    stored = cloud.objects.buckets["my-bucket"]
    assert {name: blob.data for name, blob in stored.items()} == {
        "runs/r-1/a": b"s/s",
        "runs/r-1/a-1": b"t",
    }


def test_who_puts_does_not_wait_for_the_network(outbox: Spool, bucket: Bucket) -> None:
    hanging = threading.Event()
    bucket.trouble = lambda name: None if hanging.wait(20) else OutputError("nobody let it go")
    began = time.monotonic()
    for number in range(200):
        outbox.put(f"m/{number}", b"row\n" * 25)
    assert time.monotonic() - began < 10
    assert not outbox.wait(0.01)
    hanging.set()
    assert outbox.wait(10)
    assert len(bucket.list()) == 200


def test_memory_holds_names_only(outbox: Spool, bucket: Bucket, tmp_path: Path) -> None:
    bucket.trouble = away
    data = os.urandom(1 << 20)
    outbox.put("warm", b"")
    tracemalloc.start()
    for number in range(200):
        outbox.put(f"m/{number}", data)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1 << 20
    assert most < 5 << 20
    assert sum(path.stat().st_size for path in (tmp_path / "spool").rglob("*")) > 200 << 20
    bucket.trouble = lambda name: None
    assert outbox.wait(30)
    assert bucket.read("m/199") == data


def test_an_outage_is_sat_out_and_said_once(
    outbox: Spool, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.trouble = away
    outbox.put("m/1", b"1")
    outbox.put("m/2", b"2")
    assert waited(lambda: len(bucket.asked) > 5)
    bucket.trouble = lambda name: None
    assert outbox.wait(10)
    assert bucket.list() == ["m/1", "m/2"]
    assert set(bucket.asked[:-1]) == {"m/1"}, "while nothing can be reached, nothing else is tried"
    begin, end = capsys.readouterr().err.splitlines()
    place = f"it is in {tmp_path / 'spool'}/launch-spool-"
    assert begin.startswith("train: warning: uploading m/1 fails since ")
    assert f": m/1 can't be reached. Nothing is lost: {place}" in begin
    assert end.startswith(f"train: warning: {URL} was not reachable for ")


def test_an_object_that_is_refused_lets_the_others_pass(outbox: Spool, bucket: Bucket) -> None:
    """A retention policy that forbids to replace one file must not hold up the metrics."""
    bucket.trouble = lambda name: OutputError("held") if name == "logs/events" else None
    (bucket.folder.parent / "events").write_bytes(b"events")
    outbox.put_file("logs/events", bucket.folder.parent / "events")
    for number in range(5):
        outbox.put(f"m/{number}", b"")
    assert waited(lambda: len(bucket.list()) == 5)
    assert waited(lambda: bucket.asked.count("logs/events") > 3)
    assert not outbox.wait(0.05)
    bucket.trouble = lambda name: None
    assert outbox.wait(10)
    assert bucket.read("logs/events") == b"events"


def test_even_an_error_that_nobody_thought_of_ends_nothing(outbox: Spool, bucket: Bucket) -> None:
    errors = iter([KeyError("x"), ValueError("y"), MemoryError()])
    bucket.trouble = lambda name: next(errors, None)
    outbox.put("m/1", b"1")
    assert outbox.wait(10)
    assert bucket.list() == ["m/1"]


def test_of_a_file_the_newest_content_wins(outbox: Spool, bucket: Bucket, tmp_path: Path) -> None:
    bucket.trouble = away
    for number in range(50):
        (tmp_path / "events").write_bytes(b"x" * number)
        outbox.put_file("logs/events", tmp_path / "events")
    (tmp_path / "events").unlink()
    kept = list((tmp_path / "spool").rglob("*.last.*"))
    assert len(kept) <= 2, "the one on its way, and the newest"
    bucket.trouble = lambda name: None
    assert outbox.wait(10)
    assert bucket.read("logs/events") == b"x" * 49


class Slow(Bucket):
    """Refuses, or can't be reached, after a while: `begun` is set when it is asked first, and then waits for `go`."""

    def __init__(self, folder: Path, error: Exception) -> None:
        super().__init__(folder)
        self.begun, self.go = threading.Event(), threading.Event()
        self.trouble = lambda name: self._first(error)

    def _first(self, error: Exception) -> Exception | None:
        if self.begun.is_set():
            return None
        self.begun.set()
        assert self.go.wait(10)
        return error


@pytest.mark.parametrize("error", [OutputError("forbidden"), UnreachableError("away")])
def test_an_older_content_that_failed_never_replaces_a_newer(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way when the newer came, which has a number of its own."""
    monkeypatch.setattr(upload_queue, "FIRST_WAIT", 0.01)
    bucket = Slow(tmp_path / "bucket", error)
    outbox, events = Spool(bucket, new_folder(str(tmp_path / "spool"), URL)), tmp_path / "events"
    events.write_bytes(b"old")
    outbox.put_file("logs/events", events)
    assert bucket.begun.wait(10)
    events.write_bytes(b"new")
    outbox.put_file("logs/events", events)
    bucket.go.set()
    assert outbox.wait(10)
    assert bucket.read("logs/events") == b"new"
    assert len(bucket.asked) == 2, "the old one isn't tried again"
    outbox.close(10)


def test_the_end_says_what_is_left_and_where(bucket: Bucket, tmp_path: Path) -> None:
    outbox = Spool(bucket, new_folder(str(tmp_path / "spool"), URL))
    bucket.trouble = away
    outbox.put("m/1", bytes(1_500_000))
    outbox.put("m/2", bytes(1_500_000))
    with pytest.raises(
        OutputError, match=r"2 objects \(3\.000 MB\) did not reach gs://.* they are in /.*/launch-spool-"
    ):
        outbox.close(0.05)
    outbox.close(0.05)
    bucket.trouble = lambda name: None
    assert sweep_spools(tmp_path / "spool", bucket, 10) == 0
    assert bucket.list() == ["m/1", "m/2"]


# --- What is left by those who have gone ----------------------------------------------------------------------------


def _filled(data: bytes, half: Path) -> None:
    half.write_bytes(data)


def left_by_the_dead(base: Path, objects: dict[str, bytes], url: str = URL) -> Path:
    folder = new_folder(str(base), url)
    for name, data in objects.items():
        folder.write(name, partial(_filled, data))
        folder.keep(name, create=not name.startswith("logs/"), instead=None)
    folder.lock.close()
    return folder.path


def test_the_living_and_strangers_are_not_swept(outbox: Spool, bucket: Bucket, tmp_path: Path) -> None:
    base = tmp_path / "spool"
    bucket.trouble = away
    outbox.put("living", b"1")
    left_by_the_dead(base, {"stranger": b"1"}, url="gs://my-bucket/runs/other")
    left_by_the_dead(base, {"dead": b"1", "logs/dead": b"2"})
    (base / "launch-spool-odd").mkdir()
    (base / ".launch-spool-begun").mkdir()
    other = LocalFolder(bucket.folder)
    other.url = URL
    assert sweep_spools(base, other, 10) == 0
    assert other.list() == ["dead", "logs/dead"]
    assert len([path for path in base.rglob("*") if SpoolEntry.of(path)]) == 2


def test_what_a_sweep_can_not_send_stays(bucket: Bucket, tmp_path: Path) -> None:
    objects = {f"m/{number}": b"%d" % number for number in range(10)}
    left_by_the_dead(tmp_path, objects)
    bucket.trouble = lambda name: OutputError("held") if name in ("m/3", "m/4") else None
    assert sweep_spools(tmp_path, bucket, 10) == 2
    assert len(bucket.list()) == 8
    bucket.trouble = lambda name: None
    assert sweep_spools(tmp_path, bucket, 0) == 2
    assert sweep_spools(tmp_path, bucket, 10) == 0
    assert {name: bucket.read(name) for name in bucket.list()} == objects
    assert sweep_spools(tmp_path / "nothing", bucket, 10) == 0


def test_a_sweep_that_was_killed_may_send_again(bucket: Bucket, tmp_path: Path) -> None:
    """Between the sending and the removal of the file."""
    store = LocalFolder(bucket.folder)
    store.write("m/1.jsonl", b"mine")
    store.write("m/2.jsonl", b"theirs")
    store.write("m/2-1.jsonl", b"mine")
    left_by_the_dead(tmp_path, {"m/1.jsonl": b"mine", "m/2.jsonl": b"mine"})
    assert sweep_spools(tmp_path, bucket, 10) == 0
    assert bucket.list() == ["m/1.jsonl", "m/2-1.jsonl", "m/2.jsonl"]


def test_two_sweeps_at_once_send_each_object_once(bucket: Bucket, tmp_path: Path) -> None:
    for spool_number in range(4):
        left_by_the_dead(tmp_path, {f"m/{spool_number}-{number}": b"x" for number in range(20)})
    threads = [threading.Thread(target=sweep_spools, args=(tmp_path, bucket, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(bucket.asked) == bucket.list()
    assert len(bucket.list()) == 80


def test_a_forked_child_does_not_keep_its_parents_spool_alive(tmp_path: Path) -> None:
    """A DataLoader's worker may outlive the process that was killed."""
    code = (
        "import os, signal, time\n"
        "from launch_train.telemetry.upload_queue import new_folder\n"
        f"folder = new_folder({str(tmp_path)!r}, {URL!r})\n"
        "child = os.fork()\n"
        "if not child: os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    try:
        with taken_over(next(tmp_path.glob("launch-spool-*")), URL) as folder:
            assert folder is not None
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


@pytest.fixture
def spools(bucket: Bucket, tmp_path: Path) -> Path:
    """One object that a dead process has left."""
    left_by_the_dead(tmp_path / "spools", {"metrics/a": b"row"})
    return tmp_path / "spools"


def test_what_a_dead_process_left_is_sent_by_its_node(bucket: Bucket, spools: Path) -> None:
    said = list[str]()
    assert Leftovers(spools, bucket, said.append).send(lambda: 5.0) == 0
    assert (bucket.read("metrics/a"), said) == (b"row", [])


def test_a_disk_that_fails_is_one_line(bucket: Bucket, spools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    said = list[str]()
    monkeypatch.setattr(Path, "read_bytes", fails)
    Leftovers(spools, bucket, said.append).close(lambda: 5.0)
    assert "Input/output error" in "".join(said)
    assert said[-1].endswith(f"{spools}: keep this machine's disk")


PUTTER = """
import os, sys
from launch_train.telemetry import upload_queue as spool
from launch_train.common.storage import GcsFolder
spool.SEND_SECONDS = 0.2
outbox = spool.open_outbox(GcsFolder(sys.argv[1]), {"LAUNCH_SPOOL": sys.argv[2]})
number = 0
while True:
    name, data = f"m/{sys.argv[3]}-{number:06d}.jsonl", os.urandom(64).hex().encode() * (1 + number % 40)
    outbox.put(name, data)
    os.write(1, f"{name} {data.hex()}\\n".encode())
    with open(sys.argv[2] + "/events", "wb") as file:
        file.write(b"%d" % number)
    outbox.put_file(f"logs/{sys.argv[3]}", sys.argv[2] + "/events")
    os.write(1, f"logs/{sys.argv[3]} {(b'%d' % number).hex()}\\n".encode())
    number += 1
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_that_was_put_is_lost(
    cloud: GoogleCloud, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network comes and goes, each process is killed: all that put() had returned for is in the bucket as put."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    (tmp_path / "spool").mkdir()
    put: dict[str, list[bytes]] = defaultdict(list)
    chance = random.Random(7)
    for trial in range(6):
        cloud.faults.clear()
        if trial % 2:
            cloud.faults.down(until=clock() + 1)
        else:
            for effect in (Reset("after"), Status(503), Reset("before")):
                cloud.faults.add(Fault(INSERT, effect, after=chance.randrange(20), times=chance.randrange(1, 5)))
        for line in killed_after(chance.uniform(0.01, 0.4), [URL, str(tmp_path / "spool"), str(trial)]):
            name, _, data = line.partition(" ")
            put[name].append(bytes.fromhex(data))
    clock.advance(10)
    cloud.faults.clear()
    assert sweep_spools(tmp_path / "spool", GcsFolder(URL), 60) == 0
    stored = {name.removeprefix("runs/r-1/"): blob.data for name, blob in all_objects(cloud).items()}
    parts = {name: contents for name, contents in put.items() if name.startswith("m/")}
    assert len(parts) > 50
    assert {name: stored.get(name) for name in parts} == {name: contents[0] for name, contents in parts.items()}
    files = {name: int(contents[-1]) for name, contents in put.items() if name.startswith("logs/")}
    assert all(int(stored[name]) - last in (0, 1) for name, last in files.items()), "the last, or the one being put"
    assert [name for name in stored if name.startswith("m/") and name.count("-") > 1] == [], "nothing is there twice"
    assert list((tmp_path / "spool").glob("launch-spool-*")) == []


def all_objects(cloud: GoogleCloud) -> dict[str, Any]:
    return dict(cloud.objects.buckets["my-bucket"])


def killed_after(seconds: float, args: list[str]) -> list[str]:
    """The whole lines that a putter wrote before it was killed, so many seconds after its first."""
    process = subprocess.Popen([sys.executable, "-c", PUTTER, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout
    first = process.stdout.readline()
    killer = threading.Timer(seconds, process.kill)
    killer.start()
    rest = process.stdout.read()
    killer.join()
    process.wait()
    process.stdout.close()
    lines = (first + rest).decode().splitlines(keepends=True)
    return [line.rstrip("\n") for line in lines if line.endswith("\n")]


def test_a_stalled_bucket_and_an_outage_of_minutes(
    cloud: GoogleCloud, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, on a clock of its own: storage's own patience runs out first, then the spool goes on."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    monkeypatch.setattr(retry, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(upload_queue, "FIRST_WAIT", 0.01)
    storage: Storage = GcsFolder(URL, world=RetryClock(clock, clock.advance))
    outbox = Spool(storage, new_folder(str(tmp_path), URL))
    outage = cloud.faults.down(until=clock() + 180)
    stall = cloud.faults.add(Fault(INSERT, Stalled()))
    outbox.put("m/1", b"1")
    assert outbox.wait(30)
    outbox.close(1)
    assert all_objects(cloud)["runs/r-1/m/1"].data == b"1"
    assert cloud.faults.used[outage] > 10
    assert cloud.faults.used[stall] == 1

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch_train import metrics, runfolder
from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import Buffer, GcsFolder, LocalFolder, open_storage
from launch_train.telemetry import metric_sink, rows, upload_queue
from launch_train.telemetry.upload_queue import Outbox
from launcher.runs.metrics.progress import parse_record
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Status


def rows_of(folder: Path) -> list[dict[str, Any]]:
    storage = LocalFolder(folder)
    return [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]


def sink(folder: Path, **env: str) -> metric_sink.Sink:
    return metric_sink.open_sink({contract.RUN_FOLDER: str(folder), **env}, ())


def parts(storage: LocalFolder, board: Any = None) -> metric_sink.MetricsWriter:
    return metric_sink.MetricsWriter(storage, Outbox(storage), metric_sink.part_names({}), board)


def test_rows_come_out_in_order_and_complete(tmp_path: Path) -> None:
    out = sink(tmp_path)
    for block in range(100):
        out.put([{"step": 10 * block + i, "loss": 1 / (i + 1)} for i in range(10)])
    out.close()
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1000))


def test_parts_are_named_by_attempt_generation_and_node(tmp_path: Path) -> None:
    out = sink(tmp_path, LAUNCH_ATTEMPT="3", LAUNCH_GENERATION="2", LAUNCH_NODE="0")
    out.put([{"step": 1}])
    out.close()
    assert LocalFolder(tmp_path).list() == ["metrics/0003-0002-0000-000000.jsonl"]


def test_a_second_start_under_the_same_numbers_goes_on_behind_the_first(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        out = sink(tmp_path)
        out.put([{"step": step}])
        out.close()
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert len(LocalFolder(tmp_path).list("metrics/")) == 3


def test_rows_reach_the_folder_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sink, "FLUSH_SECONDS", 0.01)
    written, storage = threading.Event(), LocalFolder(tmp_path)

    class Watched(LocalFolder):
        def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
            version = super().write(name, data, create=create, crc32c=crc32c)
            written.set()
            return version

    out = parts(Watched(tmp_path))
    out.put([{"step": 1}])
    assert written.wait(10)
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    out.put([{"step": 2}])
    out.close()
    assert len(storage.list("metrics/")) == 2


def test_only_rank_0_of_all_and_only_with_a_folder(tmp_path: Path) -> None:
    assert type(metric_sink.open_sink({})) is metric_sink.Sink
    assert type(sink(tmp_path, RANK="1", LAUNCH_NODE="0")) is metric_sink.Sink
    assert type(sink(tmp_path, LAUNCH_NODE="1")) is metric_sink.Sink
    for env in ({"RANK": "0", "LAUNCH_NODE": "0"}, {}):
        out = sink(tmp_path, **env)
        assert isinstance(out, metric_sink.MetricsWriter)
        out.close()


def test_a_row_is_strict_json() -> None:
    row = {"step": np.int64(3), "loss": torch.tensor(0.5), "lr": float("nan"), "x": float("-inf"), "ok": True}
    row |= {"p": Path("a"), "config": {"betas": (0.9, float("inf"))}}
    plain = rows.plain_row(row)
    assert (plain["step"], plain["loss"], plain["ok"], plain["p"]) == (3, 0.5, True, "a")
    assert (plain["lr"], plain["x"], plain["nonfinite"]) == (None, None, {"lr": "nan", "x": "-inf"})
    json.dumps(plain, allow_nan=False)


class Broken(LocalFolder):
    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        raise OutputError("the disk is full")


def test_a_value_of_the_users_named_nonfinite_stops_nothing(tmp_path: Path) -> None:
    script = "from launch_train import metrics\nfor step in (1, 2): metrics.log(step, nonfinite=step, loss=0.5)"
    env = {**os.environ, contract.RUN_FOLDER: str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [(row["nonfinite"], row["loss"]) for row in rows_of(tmp_path)] == [(1, 0.5), (2, 0.5)]


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({"a": None, "b": None, "nonfinite": {"a": "nan", "b": "-inf"}}, {"a": "nan", "b": "-inf"}),
        ({"nonfinite": 3}, {}),
        ({"nonfinite": "a"}, {}),
        ({"nonfinite": [1, {}]}, {}),
        ({"nonfinite": {"a": 0.5, "b": None, "c": {}}}, {}),
        ({}, {}),
    ],
)
def test_which_values_of_a_row_were_no_numbers(row: dict[str, Any], lost: dict[str, str]) -> None:
    assert runfolder.nonfinite(row) == lost


def test_a_folder_that_fails_stops_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sink, "FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(metric_sink, "QUEUE_BLOCKS", 2)
    out = parts(Broken(tmp_path))

    def train_for_ever() -> None:
        while True:
            out.put([{"step": 1}])

    with pytest.raises(OutputError, match="disk is full"):
        train_for_ever()
    with pytest.raises(OutputError, match="disk is full"):
        out.close()
    out.close()


def test_an_error_is_not_raised_in_a_forked_child_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = parts(Broken(tmp_path))
    out.put([{"step": 1}])
    assert not out.flush(10)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        out.close()
    with pytest.raises(OutputError, match="disk is full"):
        out.close()


def test_a_script_of_ones_own_needs_two_lines_and_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from launch_train import metrics\n"
        "for step in range(1, 4): metrics.log(step, loss=1 / step)\n"
        "metrics.event('end', step=3)\n"
        "print('torch' in sys.modules)\n"
        "raise SystemExit(3)\n"
    )
    env = {"PATH": "", contract.RUN_FOLDER: str(tmp_path), "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "False\n"), done.stderr
    rows = rows_of(tmp_path)
    assert [row.get("step") for row in rows] == [1, 2, 3, 3]
    assert (rows[1]["loss"], rows[3]["event"]) == (0.5, "end")
    assert all(isinstance(row["time"], float) for row in rows)
    assert list((tmp_path / "logs").iterdir())


def test_without_a_folder_a_script_runs_as_if_nothing_was_there(tmp_path: Path) -> None:
    code = "from launch_train import metrics; metrics.log(1, loss=2.0); print('done')"
    env = {"PATH": "", "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"done\n"
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_is_told_to_stop_writes_its_rows_first(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from launch_train import metrics\n"
        "for step in range(1, 4): metrics.log(step, loss=1 / step)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    own = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('my own'))\n"
    env = {"PATH": "", contract.RUN_FOLDER: str(tmp_path), "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-15, "")
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    done = subprocess.run([sys.executable, "-c", own + code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "my own\n")


FORK = """
import multiprocessing, os, signal, sys, time
from launch_train import metrics
def log(first, last):
    for step in range(first, last + 1): metrics.log(step, loss=1 / step)
def child(work):
    pid = os.fork()
    if not pid:
        work()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def stop(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)
context = multiprocessing.get_context("fork")
def process(work):
    one = context.Process(target=work)
    one.start()
    one.join()
    return one.exitcode
"""


@pytest.fixture(params=["local", "bucket"])
def forking(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a script that forks."""
    env = {"PATH": "", "PYTHONPATH": str(Path(metrics.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    if request.param == "local":
        return {**env, contract.RUN_FOLDER: str(tmp_path / "run")}
    cloud: GoogleCloud = request.getfixturevalue("cloud")
    return {**env, **request.getfixturevalue("bucket"), "STORAGE_EMULATOR_HOST": cloud.url}


def steps_of(env: dict[str, str], code: str) -> list[int]:
    """The steps whose rows a script that forks has written."""
    done = subprocess.run([sys.executable, "-c", FORK + code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    storage = open_storage(env[contract.RUN_FOLDER])
    lines = [line for name in storage.list("metrics/") for line in storage.read(name).splitlines()]
    return sorted(json.loads(line)["step"] for line in lines)


@pytest.mark.slow
def test_forked_children_leave_their_parents_rows_alone(forking: dict[str, str]) -> None:
    code = """
log(1, 3)
assert child(lambda: None) == 0
log(4, 6)
assert (child(stop), process(stop)) == (-15, -15)
log(7, 9)
pool = context.Pool(2); pool.map(abs, range(9)); pool.terminate(); pool.join()
log(10, 400)
"""
    assert steps_of(forking, code) == list(range(1, 401))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["child", "process"])
def test_what_a_forked_child_logs_itself_is_written_too(forking: dict[str, str], start: str) -> None:
    """More blocks than may wait for the thread, which a child doesn't inherit; also if the child is stopped."""
    code = f"""
log(1, 3)
assert {start}(lambda: log(1001, 1400)) == 0
assert {start}(lambda: (log(2001, 2400), stop())) == -15
log(4, 6)
"""
    assert steps_of(forking, code) == [*range(1, 7), *range(1001, 1401), *range(2001, 2401)]


@pytest.mark.slow
def test_a_forked_child_draws_no_curves(forking: dict[str, str]) -> None:
    """A start among TensorBoard's events would take back what the parent has drawn."""
    steps_of(forking, "log(101, 103)\nassert child(lambda: log(1, 3)) == 0\n")
    assert len(open_storage(forking[contract.RUN_FOLDER]).list("logs/")) == 1


@pytest.fixture
def bucket(cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a run on a bucket."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return {contract.RUN_FOLDER: "gs://my-bucket/r", contract.SPOOL: str(tmp_path / "spool")}


def stored(cloud: GoogleCloud) -> dict[str, list[dict[str, Any]]]:
    """Rows by part."""
    parts = sorted(cloud.objects.buckets["my-bucket"].items())
    return {
        name.removeprefix("r/metrics/"): [json.loads(line) for line in blob.data.splitlines()]
        for name, blob in parts
        if name.startswith("r/metrics/")
    }


def test_flush_means_that_the_rows_are_there(cloud: GoogleCloud, bucket: dict[str, str]) -> None:
    out = metric_sink.open_sink(bucket, ())
    for step in range(1, 6):
        began = time.monotonic()
        out.put([{"step": step}])
        assert out.flush(20)
        assert [row["step"] for rows in stored(cloud).values() for row in rows] == list(range(1, step + 1))
        assert time.monotonic() - began < metric_sink.FLUSH_SECONDS, "it pushes"
    out.close()
    assert out.flush(1)


def test_a_row_is_in_the_bucket_within_10_seconds(cloud: GoogleCloud, bucket: dict[str, str]) -> None:
    """With the settings of a real run, nobody flushing, and the next row far away."""
    out, began = metric_sink.open_sink(bucket), time.monotonic()
    out.put([{"step": 1}])
    while not stored(cloud) and time.monotonic() - began < 20:
        time.sleep(0.05)
    assert time.monotonic() - began < 10
    assert stored(cloud) == {"0001-0000-0000-000000.jsonl": [{"step": 1}]}
    out.close()


def test_no_outage_reaches_the_training(
    cloud: GoogleCloud, clock: FakeClock, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sink, "FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(metric_sink, "LIST_SECONDS", 0.1)
    monkeypatch.setattr(upload_queue, "SEND_SECONDS", 0.1)
    cloud.faults.down(until=clock() + 1)
    out = metric_sink.open_sink(bucket)
    for step in range(1, 301):
        out.put([{"step": step, "loss": 1.0}])
    assert not out.flush(0.3)
    clock.advance(2)
    assert out.flush(20)
    out.close()
    rows = [row for rows in stored(cloud).values() for row in rows]
    assert [row["step"] for row in rows] == list(range(1, 301))


def test_the_end_does_not_wait_for_ever_and_says_what_is_left(
    cloud: GoogleCloud, clock: FakeClock, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_queue, "SEND_SECONDS", 0.1)
    out = metric_sink.open_sink(bucket, ())
    out.put([{"step": 1}])
    assert out.flush(20)
    cloud.faults.down(until=clock() + 1e6)
    out.put([{"step": 2}])
    place = f"{bucket[contract.SPOOL]}/launch-spool-"
    with pytest.raises(OutputError, match=rf"2 objects \(0.000 MB\) did not reach gs://my-bucket/r in .*{place}"):
        out.close(0.5)
    cloud.faults.clear()
    assert upload_queue.sweep_spools(Path(bucket[contract.SPOOL]), GcsFolder(bucket[contract.RUN_FOLDER]), 20) == 0
    assert [[row["step"] for row in rows] for rows in stored(cloud).values()] == [[1], [2]]


def test_parts_begin_after_those_that_are_there(cloud: GoogleCloud, bucket: dict[str, str]) -> None:
    folder = GcsFolder(bucket[contract.RUN_FOLDER])
    for number in (0, 41, 99):
        folder.write(runfolder.metrics_part(1, 0, 0, number), b"{}\n")
    folder.write("metrics/0001-0000-0000-000100-1.jsonl", b"{}\n")
    folder.write(runfolder.metrics_part(1, 1, 0, 500), b"{}\n")
    asked = len(cloud.requests)
    out = metric_sink.open_sink(bucket, ())
    out.put([{"step": 1}])
    out.close()
    assert "0001-0000-0000-000101.jsonl" in stored(cloud)
    assert [request.method for request in cloud.requests[asked:]] == ["GET", "POST", "POST"], (
        "one listing, one part, its newest row"
    )


def test_the_newest_row_is_one_object_that_is_seldom_replaced(
    cloud: GoogleCloud, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sink, "FLUSH_SECONDS", 0.001)
    folder = GcsFolder(bucket[contract.RUN_FOLDER])
    out = metric_sink.open_sink({**bucket, contract.ATTEMPT: "3"}, ())
    for block in ([{"event": "start", "config": {"steps": 9}}], [{"step": 1, "loss": 2.0}], [{"event": "eval"}]):
        out.put(block)
        assert out.flush(20)
    assert json.loads(folder.read(runfolder.PROGRESS)) == {"attempt": 3, "steps": 9, "row": {"step": 1, "loss": 2.0}}
    for step in range(2, 6):
        out.put([{"step": step, "loss": float("nan")}])
        assert out.flush(20)
    assert json.loads(folder.read(runfolder.PROGRESS))["row"]["step"] == 1, "one upload in 30 s"
    out.close()
    newest = json.loads(folder.read(runfolder.PROGRESS))["row"]
    assert newest == {"step": 5, "loss": None, "nonfinite": {"loss": "nan"}}
    found = parse_record(folder.read(runfolder.PROGRESS))
    assert found is not None
    assert (found.step, found.steps, math.isnan(found.loss or 0.0)) == (5, 9, True)
    assert [parse_record(text) for text in (b"", b"{", b'{"row": 3}', b'{"row": {"step": null}}')] == [None] * 4


def test_without_the_listing_no_row_is_lost(
    cloud: GoogleCloud, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sink, "LIST_SECONDS", 0.1)
    cloud.faults.add(Fault("storage.objects.list", Status(503), times=None))
    GcsFolder(bucket[contract.RUN_FOLDER]).write(runfolder.metrics_part(1, 0, 0, 0), b"{}\n")
    out = metric_sink.open_sink(bucket, ())
    out.put([{"step": 1}])
    out.close()
    assert stored(cloud) == {"0001-0000-0000-000000.jsonl": [{}], "0001-0000-0000-000000-1.jsonl": [{"step": 1}]}


def test_a_bucket_that_is_not_there_is_said_at_once(bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sink, "FLUSH_SECONDS", 0.001)
    out = metric_sink.open_sink({**bucket, contract.RUN_FOLDER: "gs://no-such-bucket/r"}, ())
    out.put([{"step": 1}])
    assert not out.flush(20)
    with pytest.raises(OutputError, match="bucket no-such-bucket does not exist"):
        out.put([{"step": 2}])
    with pytest.raises(OutputError, match="bucket no-such-bucket does not exist"):
        out.close()


def test_what_a_killed_script_had_put_is_swept(cloud: GoogleCloud, clock: FakeClock, bucket: dict[str, str]) -> None:
    cloud.faults.down(until=clock() + 1)
    code = (
        "import os, signal; from launch_train import metrics; from launch_train.telemetry import metric_sink\n"
        "metric_sink.FLUSH_SECONDS = 0.001; metric_sink.LIST_SECONDS = 0.1\n"
        "for step in range(1, 101): metrics.log(step, loss=1 / step)\n"
        "sink = metrics._default(); sink.flush(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {
        **bucket,
        "PATH": "",
        "STORAGE_EMULATOR_HOST": cloud.url,
        "PYTHONPATH": str(Path(metrics.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert stored(cloud) == {}
    clock.advance(2)
    assert upload_queue.sweep_spools(Path(bucket[contract.SPOOL]), GcsFolder(bucket[contract.RUN_FOLDER]), 20) == 0
    assert [row["step"] for rows in stored(cloud).values() for row in rows] == list(range(1, 101))


@pytest.mark.parametrize("step", [3, np.int64(3), np.float32(3), 3.0, torch.tensor(3)])
def test_a_step_is_a_whole_number(step: Any) -> None:
    assert rows.whole_step(step) == 3
    assert type(rows.whole_step(step)) is int


@pytest.mark.parametrize("step", ["3", 3.5, None, float("nan"), float("inf"), [3], torch.zeros(2), 1j])
def test_another_step_is_refused_at_once(step: Any) -> None:
    with pytest.raises(TypeError, match=r"metrics.log: the step must be a whole number, not "):
        metrics.log(step, loss=1.0)

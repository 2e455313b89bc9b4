"""The monitor: a thread that looks, writes parts, warns, and never holds anything up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launch_train.common.errors import OutputError
from launch_train.common.storage import GcsFolder, LocalFolder
from launch_train.monitoring import monitor
from launch_train.monitoring.monitor import BoundedCall, LazySink, Monitor, NodeMonitor, open_monitor
from launch_train.monitoring.nvml import open_gpus
from launch_train.telemetry.metric_sink import Sink
from launch_train.telemetry.rows import Row
from launch_train.telemetry.upload_queue import sweep_spools
from tests.train.monitoring.fakenvml import Device, FakeNvml

if TYPE_CHECKING:  # a GPU machine has no Google libraries
    from launcher.testing.googlecloud import FakeClock, GoogleCloud


class Kept(Sink):
    """Keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def put(self, rows: Sequence[Row]) -> None:
        self.rows += rows


def gpus_of(*devices: Device, **more: Any) -> Callable[[], list[Row]]:
    gpus = open_gpus({}, FakeNvml(list(devices), **more))
    assert gpus is not None
    return gpus.sample


@pytest.fixture(autouse=True)
def _no_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "FIRST_SECONDS", 3600.0)


@contextmanager
def watching(
    look: Callable[[], list[Row] | None] = lambda: None,
    host: Callable[[], Row | None] = lambda: {"cpu": 0.5},
    rows: Sink | None = None,
    events: Sink | None = None,
) -> Iterator[NodeMonitor]:
    """One that looks when the test says so."""
    one = NodeMonitor(3600.0, 0, BoundedCall(host, "host"), BoundedCall(look, "gpus"), rows or Sink(), events or Sink())
    yield one
    one.close()


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_look_has_the_host_and_the_gpus() -> None:
    rows = Kept()
    with watching(gpus_of(Device(), Device()), rows=rows) as watch:
        assert watch.facts() == {}
        watch.sample()
        watch.sample()
        facts = watch.facts()["monitor"]
    assert [sorted(row) for row in rows.rows] == [["gpus", "host", "time"]] * 2
    assert (facts["looks"], facts["gpu_util_mean"], facts["gpu_mem_max_gb"], facts["cpu_mean"]) == (2, 0.97, 60.0, 0.5)
    assert facts["throttled"] == {"sw_power_cap": 1.0}


def test_without_gpus_the_host_alone() -> None:
    rows = Kept()
    with watching(rows=rows) as watch:
        watch.sample()
    assert rows.rows[0].keys() == {"time", "host"}


def test_errors_of_a_gpu_are_events_of_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    events = Kept()
    with watching(gpus_of(Device(), xids=[(0, 94)]), events=events) as watch:
        watch.sample()
        watch.sample()
    [event] = events.rows
    assert (event["event"], event["xid"], event["doubtful"], event["node"]) == ("gpu_error", 94, True, 0)
    assert capfd.readouterr().err.count("train: node 0, GPU 0: Xid 94: ") == 1


def test_a_driver_that_hangs_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(monitor, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("launch_train.monitoring.alerts.SILENT_SECONDS", 0.03)
    released, rows, calls = threading.Event(), Kept(), []

    def hang() -> list[Row]:
        calls.append(1)
        released.wait(60)
        return [{"gpu": 0, "util": 0.5}]

    with watching(hang, rows=rows) as watch:
        for _ in range(5):
            watch.sample()
        assert (len(calls), len(rows.rows), [row for row in rows.rows if "gpus" in row]) == (1, 5, [])
        assert capfd.readouterr().err.count("the NVIDIA driver has not responded") == 1
        began = time.monotonic()
        watch.close()
        assert time.monotonic() - began < 10
        released.set()


def test_a_host_that_can_not_be_looked_at_leaves_the_gpus() -> None:
    def broken() -> Row:
        raise FileNotFoundError("/proc/diskstats")

    rows = Kept()
    with watching(gpus_of(Device()), host=broken, rows=rows) as watch:
        watch.sample()
        watch.sample()
    assert [row.keys() for row in rows.rows] == [{"time", "gpus"}] * 2


def test_a_look_that_fails_ends_the_looking_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    watch = NodeMonitor(
        0.001, 0, BoundedCall(lambda: None, "host"), BoundedCall(lambda: None, "gpus"), Broken(), Sink()
    )
    watch._thread.join(10)
    watch.close()
    assert "warning: machine monitoring has stopped: OutputError: the disk is full" in capfd.readouterr().err


def test_one_a_node_and_none_for_zero_seconds() -> None:
    assert type(open_monitor(0, {})) is Monitor
    assert type(open_monitor(5, {}, rank=9, local_rank=1)) is Monitor
    assert Monitor().facts() == {}
    Monitor().close()


def test_a_bucket_that_is_away_does_not_hold_the_end_up(
    cloud: GoogleCloud, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    monkeypatch.setattr(monitor, "PART_SECONDS", 0.01)
    env = {"LAUNCH_RUN_FOLDER": "gs://my-bucket/r", "LAUNCH_SPOOL": str(tmp_path / "spool")}
    watch = open_monitor(3600, env)
    assert isinstance(watch, NodeMonitor)
    watch.sample()
    until(lambda: GcsFolder("gs://my-bucket/r").list("monitor/"))
    cloud.faults.down(until=clock() + 1e6)
    watch.sample()
    began = time.monotonic()
    watch.close()
    assert time.monotonic() - began < 10
    cloud.faults.clear()
    assert sweep_spools(tmp_path / "spool", GcsFolder("gs://my-bucket/r"), 20) == 0
    assert len(GcsFolder("gs://my-bucket/r").list("monitor/")) == 2, "the node sends what was left"


@pytest.mark.parametrize("node", [0, 1])
def test_errors_are_the_runs_on_node_0_and_parts_of_their_own_on_another(tmp_path: Path, node: int) -> None:
    run_sink, storage = Kept(), LocalFolder(tmp_path)
    watch = open_monitor(3600, {"LAUNCH_RUN_FOLDER": str(tmp_path), "LAUNCH_NODE": str(node)}, run_sink, rank=8 * node)
    assert isinstance(watch, NodeMonitor)
    watch._gpus = BoundedCall(gpus_of(Device(), xids=[(0, 48)]), "gpus")
    watch.sample()
    watch.close()
    assert storage.list("metrics/") == ["metrics/0001-0000-0001-000000.jsonl"] * node
    written = [json.loads(storage.read(name)) for name in storage.list("metrics/")]
    assert [row["xid"] for row in written] == [48] * node
    assert [row["xid"] for row in run_sink.rows] == [48] * (1 - node)


class Broken(Sink):
    def put(self, rows: Sequence[Row]) -> None:
        raise OutputError("the disk is full")

    def close(self, limit: float | None = None, *, failed: bool = False) -> None:
        raise OutputError("the disk is full")


def test_a_folder_that_can_not_be_written_ends_the_writing(capfd: pytest.CaptureFixture[str]) -> None:
    with watching(rows=LazySink(Broken)) as watch:
        for _ in range(3):
            watch.sample()
        assert watch.facts()["monitor"]["looks"] == 3
    assert capfd.readouterr().err == "train: warning: machine metrics are no longer written: the disk is full\n"


@pytest.mark.gpu
def test_the_gpus_of_this_machine_are_looked_at(tmp_path: Path) -> None:
    watch = open_monitor(0.2, {"LAUNCH_RUN_FOLDER": str(tmp_path)})
    until(lambda: "gpu_util_mean" in watch.facts().get("monitor", {}))
    watch.close()

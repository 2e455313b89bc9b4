"""Saves beside training, when the run folder gives trouble: training goes on, and what was durable stays so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch_train import checkpoint
from launch_train.checkpointing import async_saver, multipart_writer
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing.async_saver import Saver, Snapshot
from launch_train.checkpointing.interval import from_settings
from launch_train.checkpointing.lease import Lease
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import OutputError, PreemptedError
from launch_train.common.storage import Buffer, LocalFolder, Storage
from launch_train.distributed.process_group import Ranks
from launch_train.runfolder.starts import parse_metrics
from launch_train.telemetry.metric_sink import Sink
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run
from launcher.testing.googlecloud import GoogleCloud
from launcher.testing.googlecloud.faults import Fault, Reset, Slow, Status
from tests.train import trials
from tests.train.trainer.test_cuda_threads import until_done
from tests.train.trials import STEPS, differences, train, waiting_for_saves

OFTEN = {"minutes": 1e-6, "keep": {"last": 2}}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    """A bucket in this process's environment; it stays until no save or upload is under way any more."""
    for name, value in cloud.environ().items():
        monkeypatch.setenv(name, value)
    yield cloud
    cloud.faults.clear()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith(("checkpoint", "spool"))]:
        thread.join(10)


RUN = "gs://my-bucket/runs/one"


def names(cloud: GoogleCloud) -> list[str]:
    return [blob.name.removeprefix("runs/one/") for blob in cloud.objects.listed("my-bucket")]


def test_a_bucket_is_like_a_folder(bucket: GoogleCloud, tmp_path: Path) -> None:
    train(tmp_path / "whole")
    with trials.sigterm_after(10), pytest.raises(PreemptedError):
        train(RUN, checkpoint=OFTEN)
    train(RUN, generation=1, checkpoint=OFTEN)
    assert differences(tmp_path / "whole", RUN) == set()


def test_what_a_save_takes_is_measured(tmp_path: Path) -> None:
    """After a preemption notice the ranks wait for each other as long as such a save still fits."""
    took = set[float]()
    with waiting_for_saves(lambda run: took.add(run.saver.seconds if run.saver else 0.0)):
        train(tmp_path / "run", checkpoint=OFTEN)
    assert all(0 < seconds < async_saver.FIRST_SECONDS for seconds in took - {async_saver.FIRST_SECONDS})
    assert len(took) >= 2


class SlowFolder(LocalFolder):
    """A folder in which each object takes `seconds` of a clock."""

    def __init__(self, folder: Path, clock: list[float], seconds: float) -> None:
        super().__init__(folder)
        self.clock, self.object_seconds = clock, seconds

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        self.clock[0] += self.object_seconds
        return super().write(name, data, create=create, crc32c=crc32c)


@pytest.mark.parametrize(
    ("object_seconds", "minutes", "first"),
    [
        (0.0, "auto", 60),
        (0.0, 10, 60),
        (0.0, 0.5, 30),
        (2.0, "auto", 80),  # two objects, of 2 s each
        (4.0, 10, 160),
        (9.0, 10, 300),
        (2.0, "off", None),
    ],
)
def test_the_first_checkpoint_comes_early_and_the_next_by_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, object_seconds: float, minutes: float | str, first: float | None
) -> None:
    clock, settings = [1000.0], parse({"checkpoint": {"minutes": minutes}}).checkpoint
    folder = SlowFolder(tmp_path, clock, object_seconds)
    for module in (async_saver, multipart_writer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(async_saver, "TEST_SECONDS", 1000.0)
    lease = Lease(folder, "0001-0000")
    began = clock[0]
    saver = Saver(
        *(Ranks(), folder, settings, Sink()), start="0001-0000", lease=lease, interval=from_settings(settings, {})
    )
    state = {"w": torch.zeros(multipart_writer.PART_BYTES // 4 + 1)}
    saver.estimate(lambda: state)
    until_done("write test")
    assert [name for name in folder.list() if "write-test" in name] == []
    assert saver.seconds == pytest.approx(2 * object_seconds)
    if first is None:
        clock[0] += 1e9
        assert not saver.due()
        return
    clock[0] = began + first - 1
    assert not saver.due()
    clock[0] = began + first + 1
    assert saver.due()
    saver.begin(1, Snapshot(state, {}, {}, frozenset()))
    until_done("checkpoint")
    saver.after_step(2, 0.0, 0.0, 0)
    if isinstance(minutes, (int, float)):
        clock[0] = began + first + 60 * minutes
        assert not saver.due()
        clock[0] += 2
        assert saver.due()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("storage.objects.insert", Status(503), name="checkpoints/", times=3),
        Fault("storage.objects.insert", Status(429), name="LATEST", times=3, after=1),
        Fault("storage.objects.insert", Reset("before"), name="manifest", times=2),
        Fault("storage.objects.insert", Reset("after"), name="manifest", times=1),
        Fault("storage.objects.insert", Reset("after"), name="LATEST", times=1),
        Fault("storage.objects.insert", Reset("after"), name="LATEST", times=2, after=1),
        Fault("storage.objects.get", Status(503), name="LATEST", times=2),
        Fault("storage.objects.delete", Reset("after"), name="checkpoints/", times=4),
    ],
    ids=lambda fault: f"{fault.effect}-{fault.name}",
)
def test_what_passes_by_itself_is_not_even_noticed(
    bucket: GoogleCloud, capsys: pytest.CaptureFixture[str], fault: Fault
) -> None:
    """A lost answer of the manifest or of the pointer is recognised: it isn't taken for another writer."""
    bucket.faults.add(fault)
    train(RUN, checkpoint=OFTEN)
    assert bucket.faults.used[fault] == fault.times
    assert "checkpoint of step" not in capsys.readouterr().err
    assert checkpoint.load(RUN)["loop"]["step"] == STEPS


@pytest.mark.slow
def test_a_save_that_fails_costs_a_line_and_not_the_run(
    bucket: GoogleCloud, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch_train.checkpointing.async_saver.LIMIT_SECONDS", 0.5)
    fault = bucket.faults.add(Fault("storage.objects.insert", Status(503), name=r"step-\d+/.*part", times=6))
    with waiting_for_saves():
        train(RUN, checkpoint=OFTEN)
    err = capsys.readouterr().err
    assert bucket.faults.used[fault] == 6
    assert "train: checkpoint of step 1 failed: gs://my-bucket/runs/one/checkpoints/step-00000001" in err
    assert "training continues" in err
    assert checkpoint.load(RUN)["loop"]["step"] == STEPS
    assert not [name for name in names(bucket) if "step-00000001/" in name]


def test_training_does_not_wait_for_a_slow_bucket(bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last save: while one takes two seconds, all other steps are done."""
    bucket.faults.add(Fault("storage.objects.insert", Slow(2.0), name=r"step-\d+/", times=1))
    real, beside = loop.train_step, []

    def counted(run: Any) -> None:
        real(run)
        beside.append(run.saver._is_saving())

    monkeypatch.setattr(loop, "train_step", counted)
    train(RUN, steps=100, eval={"every": 0}, checkpoint=OFTEN)
    assert sum(beside[:60]) > 40


def test_rows_are_durable_before_the_checkpoint_behind_them(
    bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every manifest the bucket has the rows of all steps up to it: those are never done, and told, again."""
    bucket.faults.add(Fault("storage.objects.insert", Slow(0.2), name="metrics/", times=None))
    real, found = manifests.commit, []

    def commit(storage: Storage, manifest: manifests.Manifest) -> None:
        parts = {name: storage.read(name) for name in storage.list("metrics/")}
        found.append(({row["step"] for row in parse_metrics(parts).rows}, manifest.step))
        real(storage, manifest)

    monkeypatch.setattr(manifests, "commit", commit)
    with waiting_for_saves():
        train(RUN, steps=8, optimizer={"warmup_steps": 0}, checkpoint=OFTEN)
    assert len(found) > 1
    assert all(steps == set(range(1, step + 1)) for steps, step in found)


def test_a_checkpoint_does_not_wait_for_rows_for_ever(
    bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch_train.checkpointing.async_saver.ROWS_SECONDS", 0.3)
    bucket.faults.add(Fault("storage.objects.insert", Status(503), name="metrics/", times=None))

    def enough(run: Run) -> None:
        if run.state["step"] == 3:
            raise RuntimeError("enough")

    with waiting_for_saves(enough), pytest.raises(RuntimeError, match="enough"):
        train(RUN, checkpoint=OFTEN)
    assert "the metrics up to step 1 are not in the run folder yet" in capsys.readouterr().err
    assert checkpoint.load(RUN)["loop"]["step"] >= 1


def test_a_pointer_that_stalls_does_not_hold_a_preemption(bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is there: that is what counts. Its pointer gets what is left of the time."""
    monkeypatch.setattr(contract, "SAVE_SECONDS", 2.0)
    bucket.faults.add(Fault("storage.objects.insert", Status(503), name="LATEST", times=None, after=1))
    began = time.monotonic()
    with trials.sigterm_after(9), pytest.raises(SystemExit):
        train(RUN)
    assert time.monotonic() - began < 10
    assert checkpoint.load(RUN)["loop"]["step"] == 10


@pytest.mark.slow
def test_a_save_under_way_is_given_up_in_time(bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the save before hangs in the network: the one of the preemption doesn't wait for it."""
    monkeypatch.setattr("launch_train.checkpointing.async_saver.CANCEL_SECONDS", 0.2)
    bucket.faults.add(Fault("storage.objects.insert", Slow(8.0), name=r"step-00000001/.*part", times=1))
    began = time.monotonic()
    with trials.sigterm_after(3), pytest.raises(PreemptedError):
        train(RUN, checkpoint=OFTEN)
    assert time.monotonic() - began < 8
    assert checkpoint.load(RUN)["loop"]["step"] == 4


def test_a_preempted_run_whose_rows_do_not_arrive_is_saved_all_the_same(
    bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "SAVE_SECONDS", 3.0)
    bucket.faults.add(Fault("storage.objects.insert", Status(503), name="metrics/", times=None))
    with trials.sigterm_after(9), pytest.raises(PreemptedError):
        train(RUN)
    assert checkpoint.load(RUN)["loop"]["step"] == 10


def test_a_bucket_that_is_not_there_is_told_at_the_start(bucket: GoogleCloud) -> None:
    with pytest.raises(OutputError, match="gcloud storage buckets create gs://no-such-bucket"):
        train("gs://no-such-bucket/runs/one")


def test_no_permission_is_told_at_the_start(bucket: GoogleCloud) -> None:
    bucket.objects.deny("my-bucket", "storage.objects.create")
    with pytest.raises(OutputError, match=r"storage\.objects\.create.*roles/storage"):
        train(RUN)


def test_soft_delete_is_told_once(bucket: GoogleCloud, capsys: pytest.CaptureFixture[str]) -> None:
    with trials.sigterm_after(3), pytest.raises(PreemptedError):
        train(RUN)
    out = capsys.readouterr().out
    assert out.count("gs://my-bucket keeps deleted checkpoints for 7 days and bills them (soft delete)") == 1
    assert "gcloud storage buckets update gs://my-bucket --clear-soft-delete" in out
    train(RUN, generation=1)
    assert "soft delete" not in capsys.readouterr().out


def test_a_preemption_that_the_link_can_not_carry_leaves_the_checkpoint_before(
    bucket: GoogleCloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with trials.sigterm_after(3), pytest.raises(PreemptedError):
        train(RUN)
    monkeypatch.setattr(contract, "SAVE_SECONDS", 1.0)
    bucket.faults.add(Fault("storage.objects.insert", Status(503), name="step-00000010/", times=None))
    began = time.monotonic()
    with trials.sigterm_after(9), pytest.raises(SystemExit) as stopped:
        train(RUN, generation=1)
    assert stopped.value.code == 143
    assert time.monotonic() - began < 8
    assert "preempted at step 10; checkpoint not saved in time" in capsys.readouterr().out
    assert checkpoint.load(RUN)["loop"]["step"] == 4


def test_a_full_disk_costs_the_checkpoint_and_not_the_one_before(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "run"
    trials.preempted(folder, 5)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "ballast").write_bytes(bytes(free - 60_000))

    def room(run: Run) -> None:
        if run.state["step"] == 12:
            (small_disk / "ballast").unlink()

    with waiting_for_saves(room):
        train(folder, generation=1, checkpoint=OFTEN)
    err = capsys.readouterr().err
    assert "checkpoint of step 7 failed" in err
    assert "No space left on device" in err or "the disk is full" in err
    assert checkpoint.load(str(folder))["loop"]["step"] == STEPS

"""Background threads that call CUDA set their rank's GPU first: a new thread's current GPU is number 0."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch_train.checkpointing.async_saver import Saver, Snapshot
from launch_train.checkpointing.interval import Interval
from launch_train.checkpointing.partition import HostCopies
from launch_train.common.config import Checkpoint
from launch_train.common.storage import LocalFolder
from launch_train.data import cuda_prefetcher
from launch_train.data.cuda_prefetcher import CudaPrefetcher
from launch_train.data.workers import BatchKey, PreparedBatch
from launch_train.distributed import process_group
from launch_train.distributed.process_group import Ranks
from launch_train.profiling.profiler import Recording
from launch_train.telemetry.metric_sink import Sink
from launch_train.trainer import shutdown

GPU = torch.device("cuda", 3)
Calls = dict[str, list[Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """CUDA's calls by the name of their thread, in order: a device that was set, or the name of another call."""
    found: Calls = defaultdict(list)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: noted(found, device))
    return found


def noted(calls: Calls, what: Any) -> Any:
    calls[threading.current_thread().name].append(what)
    return what


def until_done(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)


def test_batches_are_copied_to_the_gpu_of_their_rank(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(record_event=lambda: noted(calls, "record_event"), wait_event=lambda _event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: noted(calls, "stream") and nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(cuda_prefetcher, "move_to", lambda batch, device: noted(calls, device) and batch)
    batches = CudaPrefetcher(iter([PreparedBatch(BatchKey(1), (torch.zeros(1), torch.zeros(1)))]), GPU, lambda _: True)
    next(batches)
    batches.stop()
    assert calls["batches to the GPU"][:3] == [GPU, "stream", GPU]


@pytest.fixture
def saving(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Callable[[Ranks, Path], Saver]:
    monkeypatch.setattr(HostCopies, "ready", lambda _: noted(calls, "event.synchronize"))

    def make(ranks: Ranks, folder: Path) -> Saver:
        storage = LocalFolder(folder)
        interval = Interval(None, 1.0)
        return Saver(ranks, storage, Checkpoint(), Sink(), start="0001-0000", lease=None, interval=interval)

    return make


def test_a_checkpoint_waits_for_the_copies_on_the_gpu_of_its_rank(
    calls: Calls, saving: Callable[[Ranks, Path], Saver], tmp_path: Path
) -> None:
    saver = saving(Ranks(device=GPU), tmp_path)
    saver.begin(1, Snapshot({"w": torch.zeros(2)}, {}, {}, frozenset()))
    until_done("checkpoint")
    assert calls["checkpoint"] == [GPU, "event.synchronize"]


def test_a_scripts_checkpoints_are_of_the_gpu_that_it_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are saved by the same Saver, which goes by the device of its ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    assert process_group.joined({}).device == GPU


def test_the_last_rows_are_read_from_the_gpu_of_their_rank(calls: Calls) -> None:
    recorder = SimpleNamespace(take_block=lambda alone: noted(calls, "synchronize") and [])
    shutdown.write_last_rows(SimpleNamespace(ranks=Ranks(device=GPU), recorder=recorder, sink=Sink()))  # type: ignore[arg-type]  # the parts that are used
    until_done("last rows")
    assert calls["last rows"] == [GPU, "synchronize"]


def test_a_trace_is_exported_on_the_gpu_of_its_rank(calls: Calls) -> None:
    held = SimpleNamespace(export_chrome_trace=lambda path: noted(calls, path))
    recording = Recording(None, GPU, None)  # type: ignore[arg-type]  # neither is used
    thread = threading.Thread(target=recording._export, args=(held, "trace"), name="profile")
    thread.start()
    thread.join()
    assert calls["profile"] == [GPU, "trace"]


def test_on_a_cpu_no_gpu_is_set(calls: Calls, saving: Callable[[Ranks, Path], Saver], tmp_path: Path) -> None:
    saving(Ranks(), tmp_path).begin(1, Snapshot({"w": torch.zeros(2)}, {}, {}, frozenset()))
    until_done("checkpoint")
    assert calls["checkpoint"] == ["event.synchronize"]

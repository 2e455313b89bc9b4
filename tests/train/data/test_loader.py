from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch_train.common.config import Loader
from launch_train.common.errors import TrainError, UsageError
from launch_train.data import cuda_prefetcher
from launch_train.data.cuda_prefetcher import CudaPrefetcher
from launch_train.data.loader import BatchLoader
from launch_train.data.map_dataset import Samples
from launch_train.data.masked_lm import Masked
from launch_train.data.sample_order import share
from launch_train.data.synthetic import SyntheticImages, SyntheticTokens
from launch_train.data.text import Text
from launch_train.data.user_dataset import UserDataset, seeded
from launch_train.data.workers import BatchKey, Pool, WorkerDataset
from tests.train.data.corpora import byte_corpus

CPU = torch.device("cpu")


class Numbers:
    """A dataset that draws at random, and fails or sleeps where it is told to."""

    def __init__(self, count: int = 10, bad: int = -1, sleepy: int = -1, deadly: int = -1) -> None:
        self.count, self.bad, self.sleepy, self.deadly = count, bad, sleepy, deadly

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == self.bad:
            raise ValueError("this one is broken")
        if index == self.sleepy:
            time.sleep(60)
        if index == self.deadly and parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        drawn = {"torch": torch.rand(2), "numpy": np.random.rand(), "plain": random.random()}
        return drawn, index


def source(dataset: Numbers, batch_size: int = 4, held_out: int = 6) -> Samples:
    train, rest = UserDataset(dataset, "numbers", 7, 0), UserDataset(Numbers(held_out), "rest", 7, 1)
    return Samples(train, rest, seed=7, batch_size=batch_size, facts={}, steps=10)


@contextmanager
def fed(dataset: Numbers, workers: int, part: slice = slice(0, 4), batch_size: int = 4) -> Iterator[BatchLoader]:
    batch_loader = BatchLoader(source(dataset, batch_size), part, CPU, Loader(workers=workers))
    try:
        yield batch_loader
    finally:
        batch_loader.close()


def train(batch_loader: BatchLoader, steps: int) -> None:
    for step in range(1, steps + 1):
        batch_loader.train(step)


def late() -> int:
    """A sample that is not among the first."""
    drawn = [source(Numbers()).drawn(step) for step in (1, 2)]
    return next(one for one in drawn[1] if one not in (*drawn[0], 0))


def plain(batch: Any) -> list[Any]:
    inputs, targets = batch
    return [{name: one.tolist() for name, one in inputs.items()}, targets.tolist()]


def order_of_a_run(batch_loader: BatchLoader) -> list[Any]:
    """Training, an evaluation in between, and a jump."""
    made = [plain(batch_loader.train(step)) for step in (1, 2, 3)]
    made += [plain(batch_loader.held_out(index, 3)) for index in range(3)]
    made += [plain(batch_loader.train(step)) for step in (4, 5)]
    return made + [plain(batch_loader.train(step)) for step in (9, 10, 2)] + [plain(batch_loader.held_out(2, 3))]


def test_any_number_of_processes_makes_the_same() -> None:
    runs = []
    for workers in (0, 1, 3):
        with fed(Numbers(), workers) as batch_loader:
            runs.append(order_of_a_run(batch_loader))
    assert runs[0] == runs[1] == runs[2]
    targets = [batch[1] for batch in runs[0]]
    assert sorted(targets[0] + targets[1] + targets[2][:2]) == list(range(10))  # an epoch has each of them once


def test_two_ranks_share_what_one_has() -> None:
    whole, parts = BatchLoader(source(Numbers()), share(4, 0, 1), CPU, Loader(workers=0)), []
    for rank in range(2):
        with fed(Numbers(), rank, share(4, rank, 2)) as batch_loader:
            parts.append([plain(batch_loader.train(step))[1] for step in (1, 2, 3, 4)])
    both = [one + two for one, two in zip(*parts, strict=True)]
    assert both == [plain(whole.train(step))[1] for step in (1, 2, 3, 4)]


def test_what_training_draws_does_not_depend_on_who_makes_its_data() -> None:
    drawn = []
    for workers in (0, 1):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        with fed(Numbers(), workers) as batch_loader:
            batch_loader.train(1)
            batch_loader.held_out(0, 1)
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


def test_a_sample_is_drawn_anew_in_each_epoch_and_alike_in_the_same() -> None:
    def at(*where: int) -> float:
        with seeded(*where):
            return float(torch.rand(1)) + np.random.rand() + random.random()

    assert at(7, 0, 1, 2) == at(7, 0, 1, 2)
    assert len({at(7, 0, 1, 2), at(8, 0, 1, 2), at(7, 1, 1, 2), at(7, 0, 2, 2), at(7, 0, 1, 3)}) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_fails_is_named_in_one_line(workers: int) -> None:
    bad = late()
    with fed(Numbers(bad=bad), workers) as batch_loader, pytest.raises(UsageError) as caught:
        train(batch_loader, 5)
    assert f"numbers [{bad}] failed at" in str(caught.value)
    assert str(caught.value).endswith("ValueError: this one is broken")
    assert "\n" not in str(caught.value)


def test_processes_that_hang_are_not_waited_for() -> None:
    batch_loader = BatchLoader(source(Numbers(sleepy=late())), slice(0, 4), CPU, Loader(workers=1))
    batch_loader.train(1)
    assert batch_loader._pool is not None
    pids = batch_loader._pool.pids
    began = time.monotonic()
    while not _is_asleep(pids[0]) and time.monotonic() - began < 20:
        time.sleep(0.1)
    began = time.monotonic()
    batch_loader.close()
    assert time.monotonic() - began < 10
    assert pids
    assert not any(_is_there(pid) for pid in pids)


def _is_asleep(pid: int) -> bool:
    """In the dataset's sleep, rather than at its start."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()


def _is_there(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_in_words() -> None:
    with fed(Numbers(deadly=late()), 2) as batch_loader:
        batch_loader.train(1)
        assert batch_loader._pool is not None
        pids = batch_loader._pool.pids
        with pytest.raises(TrainError, match="a loader process exited unexpectedly"):
            train(batch_loader, 4)
    assert len(pids) == 2
    assert not any(_is_there(pid) for pid in pids)


class Refusing(Numbers):
    def __getstate__(self) -> Any:
        raise RuntimeError("there is an open connection")


def test_a_dataset_that_cannot_be_pickled_is_read_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    unpicklable = Numbers()
    unpicklable.lock = lambda: None  # type: ignore[attr-defined]  # what can't be pickled
    for dataset, reason in ((unpicklable, ""), (Refusing(), "there is an open connection")):
        with fed(dataset, 2) as batch_loader:
            assert batch_loader.choice[1:] == ("main process", "the dataset can't be pickled")
            assert len(batch_loader.train(1)[1]) == 4
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"loader: the dataset can't be sent to a worker process: {reason}")


class Counted(Numbers):
    """It notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[int]()

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.asked.append(index)
        return super().__getitem__(index)


def test_a_batch_that_is_asked_for_again_is_made_once() -> None:
    dataset = Counted()
    batch_loader = BatchLoader(source(dataset), slice(0, 4), CPU, Loader(workers=0))
    dataset.asked.clear()
    assert torch.equal(batch_loader.once(1)[1], batch_loader.once(1)[1])
    assert len(dataset.asked) == 4
    batch_loader.train(1)
    assert torch.equal(batch_loader.once(2)[1], batch_loader.train(2)[1])


class Stream:
    """A GPU's, without one."""

    def record_event(self) -> None: ...

    def wait_event(self, event: None) -> None: ...


def test_what_comes_for_training_in_an_evaluation_stays_off_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would hold all that the processes have ahead, beside what the memory probe knew of."""
    copied = list[Any]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(cuda_prefetcher, "move_to", lambda batch, device: copied.append(batch) or batch)  # type: ignore[func-returns-value]  # append gives None, and so the batch
    pool = Pool(
        WorkerDataset(source(Numbers()), slice(0, 4)),
        2,
        2,
        ahead=lambda batches, wanted: CudaPrefetcher(batches, CPU, wanted),
    )
    try:
        pool.get(BatchKey(1))
        before = len(copied)
        for index in range(2):
            pool.get(BatchKey(index, 2))
        waiting = [key for key in pool._ready if not key.of]
        assert len(waiting) >= 3
        assert len(copied) - before <= 4  # the two, and what was on its way before and behind
        assert torch.equal(pool.get(BatchKey(2))[1], source(Numbers()).train(2, slice(0, 4))[1])
    finally:
        pool.close()


RANK = """
import os, sys, time
from tests.train.data.test_loader import *
if __name__ == "__main__":
    feed = BatchLoader(source(Numbers()), slice(0, 4), CPU, Loader(workers=2))
    feed.train(1)
    print(*feed._pool.pids, flush=True)
    for line in sys.stdin:
        step = 1
        for step in range(2, 30):
            feed.train(step)
        print("fed", flush=True)
"""


@pytest.mark.slow
def test_a_signal_to_the_group_takes_no_data_away_and_nothing_outlives_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    root = str(Path(__file__).parents[3])
    rank = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert rank.stdin
    assert rank.stdout
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 2
    assert all(os.getpgid(pid) != rank.pid for pid in pids)
    (server,) = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    assert os.getpgid(server) == server
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "fed\n"
    rank.kill()
    rank.wait()
    rank.stdin.close()
    rank.stdout.close()
    deadline = time.monotonic() + 10
    while any(_is_there(pid) for pid in (*pids, server)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_is_there(pid) for pid in (*pids, server))


def test_what_is_quickly_made_is_made_here() -> None:
    batch_loader = BatchLoader(SyntheticTokens(100, 8, 1, 4, CPU), slice(0, 4), CPU, Loader(workers=4))
    assert batch_loader.choice == ("loader", "main process", "batches are cheap to prepare")
    assert torch.equal(batch_loader.train(3)[0], batch_loader.once(3)[0])
    assert batch_loader.waited() > 0
    assert batch_loader.waited() == 0
    batch_loader.close()


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_no_batch_waits_for_the_gpu(workers: int, tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    (tmp_path / "text").write_bytes(b"to be or not to be " * 1000)
    text = Text(byte_corpus(str(tmp_path / "text"), tmp_path), 64, 1, 4, gpu)
    tokens = SyntheticTokens(100, 8, 1, 4, gpu)
    every: list[Any] = [text, tokens, Masked(text, 0.15, 1, 4, gpu), Masked(tokens, 0.15, 1, 4, gpu)]
    every += [SyntheticImages(3, 32, 1, 4, gpu), source(Numbers())]
    for one in every:
        batch_loader = BatchLoader(one, slice(0, 4), gpu, Loader(workers=workers))
        batch_loader.train(1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = [batch_loader.train(step) for step in (2, 3)] + [batch_loader.held_out(0, 1), batch_loader.train(4)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
            batch_loader.close()
        there = BatchLoader(one, slice(0, 4), gpu, Loader(workers=0))
        assert torch.equal(made[3][1], there.train(4)[1])
        assert made[3][1].is_cuda

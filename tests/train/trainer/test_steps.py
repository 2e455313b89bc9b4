"""The parts of a step that only a GPU has, on fakes and by hand: times, rates, MFU, gradient scaling, compilation."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launch_train.common.config import parse
from launch_train.common.step_timer import CudaStopwatch, Stopwatch, Times, memory_gb, open_stopwatch
from launch_train.distributed.process_group import Ranks
from launch_train.trainer import reporting, train
from launch_train.trainer.metrics_buffer import Recorder, SlowRank, StepRecord

GPU = torch.device("cuda", 0)


class Watch(Stopwatch):
    """Every step takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.count = seconds, 0

    def start(self) -> None: ...

    def lap(self) -> None: ...

    def stop(self) -> None:
        self.count += 1

    def read(self) -> Times:
        count, self.count = self.count, 0
        return [(self.seconds, 1e9, 0.0)] * count


def recorded(record: Recorder, *steps: int) -> list[dict[str, Any]]:
    for step in steps:
        record.watch.stop()
        record.add(StepRecord(step, 0.1, torch.tensor(2.0 * step), torch.tensor(3.0)))
    return record.take_block()


def test_mfu_and_rates_by_hand() -> None:
    """4 GPUs of 1 PFLOP/s each could do 2e15 FLOP in half a millisecond: 0.5 s of it are a thousandth."""
    record = Recorder(Ranks(), Watch(0.5), "tokens", units=1000, flops=2e12, peak_flops=4e15)
    (row,) = recorded(record, 1)
    assert (row["loss"], row["grad_norm"], row["step_s"]) == (2.0, 3.0, 0.5)
    assert (row["mfu"], row["tokens_per_s"]) == (pytest.approx(0.001), 2000.0)
    assert record.summary(1)["mfu"] == pytest.approx(0.001)
    assert "mfu" not in recorded(Recorder(Ranks(), Watch(0.5), "tokens", units=1, flops=2e12), 1)[0]


def test_all_ranks_know_the_same_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go by it when they take turns: one that had its own idea would wait for the others, and they for it."""
    for mine, theirs in ((0.5, 0.1), (0.1, 0.5)):
        other = torch.tensor([[4.0, 3.0, theirs, 0.0, 1.0, 0.0]], dtype=torch.float64)
        monkeypatch.setattr(
            "launch_train.trainer.metrics_buffer.gather_tensors", lambda _, values, other=other: [values, other]
        )
        record = Recorder(Ranks(world=2), Watch(mine), "tokens", units=1)
        (row,) = recorded(record, 1)
        assert record.median_seconds == 0.3
        assert (row["step_s"], row["loss"]) == (mine, 3.0)


def test_a_rank_that_the_others_wait_for_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps take as long, as the ranks wait for each other; their work before the exchange of gradients differs."""
    record, work, now = Recorder(Ranks(world=3), Watch(0.5), "tokens", units=1), [0.1, 0.4, 0.1], 0.0

    def gathered(_: Ranks, values: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([values[:, :5], torch.full((len(values), 1), seconds)], dim=1) for seconds in work]

    def block() -> Any:
        monkeypatch.setattr(record.watch, "read", lambda: [(0.5, now, 0.1)])
        recorded(record, 1)
        found, record.slow = record.slow, None
        return found

    monkeypatch.setattr("launch_train.trainer.metrics_buffer.gather_tensors", gathered)
    assert block() is None  # not for long yet
    now = 11.0
    found = block()
    assert (found.rank, round(found.seconds, 3), round(found.median, 3)) == (1, 0.4, 0.1)
    now = 30.0
    assert block() is None  # known
    work[:] = [0.11, 0.1, 0.1]
    assert [block() for now in (40.0, 60.0)] == [None, None]  # hardly slower


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_is_an_event_of_the_run_and_a_line_of_rank_0(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    record = Recorder(Ranks(rank=rank, world=2), Watch(0.5), "tokens", units=1, slow=SlowRank(1, 0.4, 0.1))
    run: Any = SimpleNamespace(recorder=record, ranks=record.ranks, state={"micro_batch": 0})
    (row, slow) = reporting.add_events(run, [{"step": 7}])
    assert (row, slow.pop("time") > 0) == ({"step": 7}, True)
    assert slow == {"event": "slow_rank", "step": 7, "rank": 1, "seconds": 0.4, "median": 0.1}
    assert ("step 7: the ranks wait for rank 1" in capsys.readouterr().out) == (rank == 0)
    assert reporting.add_events(run, [{"step": 8}]) == [{"step": 8}]


@pytest.mark.parametrize(("mine", "theirs"), [(False, True), (True, False)])
def test_a_step_that_one_rank_recorded_counts_on_none(
    monkeypatch: pytest.MonkeyPatch, mine: bool, theirs: bool
) -> None:
    """Rank 0 alone has a profiler."""
    other = torch.tensor([[2.0, 3.0, 0.5, 0.0, float(theirs), 0.0]], dtype=torch.float64)
    monkeypatch.setattr("launch_train.trainer.metrics_buffer.gather_tensors", lambda _, values: [values, other])
    record = Recorder(Ranks(world=2), Watch(0.5), "tokens", units=1)
    for step, seconds in ((1, 0.5), (2, 4.0)):  # a first one counts in any case
        record.watch = Watch(seconds)
        record.watch.stop()
        record.add(StepRecord(step, 0.1, torch.tensor(2.0), torch.tensor(3.0), timed=mine))
        record.take_block()
    assert record.median_seconds == 0.5


def test_the_ranks_heed_each_other_as_soon_as_steps_become_longer() -> None:
    """The median of a thousand steps would tell too late: a preemption leaves 14 s."""
    record = Recorder(Ranks(), Watch(0.001), "tokens", units=1)
    recorded(record, *range(1, 101))
    record.watch = Watch(0.5)
    recorded(record, 101)
    assert (record.median_seconds, record.recent_seconds) == (0.001, 0.5)
    record.watch = Watch(0.0001)
    recorded(record, 102)
    assert record.recent_seconds == 0.001


def test_a_block_is_closed_before_its_rows_are_old() -> None:
    record = Recorder(Ranks(), Watch(2.0), "tokens", units=1)
    assert record.ends_block(1, 100)  # how long a step takes is not known before the first
    recorded(record, 1)
    assert [step for step in range(2, 8) if record.ends_block(step, 100)] == [3, 4, 5, 6, 7]
    assert record.ends_block(2, 2)
    quick = Recorder(Ranks(), Watch(0.001), "tokens", units=1)
    recorded(quick, 1)
    assert not quick.ends_block(99, 100)


class Event:
    """A CUDA event of a device that works through its queue at once."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, end: Event) -> float:
        if self.at is None or end.at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1000 * (end.at - self.at)


def test_a_step_that_broke_off_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    watch = CudaStopwatch()
    for began, ended in ((0.0, 2.0), (3.0, 3.5)):
        Event.now = began
        watch.start()
        Event.now = began + 0.4
        watch.lap()
        Event.now = ended
        watch.stop()
    Event.now = 4.0
    watch.start()
    assert watch.read() == [(2.0, 1e9 - 1.5, 0.4), (0.5, 1e9, pytest.approx(0.4))]
    assert watch.read() == []


def test_the_peak_of_a_gpu_is_that_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [70e9]  # of the probe that looked for the largest micro-batch
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 20e9))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    assert isinstance(open_stopwatch(GPU), CudaStopwatch)
    assert memory_gb(GPU) == 20.0


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    run: Any = SimpleNamespace(
        parameters=tuple(model.parameters()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True),
        config=parse({"optimizer": {"grad_clip": 0}}),
    )

    def step(*values: float) -> float:
        run.scaler.scale(model(torch.tensor([values])).sum()).backward()
        return train.optimizer_step(run).item()

    assert step(float("inf"), 1.0) == float("inf")
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert run.scaler.get_scale() == 4.0
    assert step(3.0, 4.0) == 5.0  # the norm is that of the true gradients, not of the scaled ones
    assert model.weight.tolist() == [[-0.5, -1.0]]
    assert run.scaler.get_scale() == 4.0
    assert model.weight.grad is None

"""Buffer metrics on the GPU and read them in blocks: reading each loss would make the host wait for the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, nan
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launch_train.common.contract import MEAN_STEPS
from launch_train.common.step_timer import Stopwatch, Times, memory_gb
from launch_train.distributed.process_group import Ranks, gather_tensors
from launch_train.telemetry.rows import Row


class StepRecord(NamedTuple):
    """The metrics of one step, which the GPU may not have finished.

    `loss` and `grad_norm` are on the device; `loss` is this rank's. `data_seconds`: time that the step waited for its
    batch. `timed`: False if its duration is not typical on this rank (the profiler was recording). `micro_batch`: its
    size in samples.
    """

    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    data_seconds: float = 0.0
    timed: bool = True
    micro_batch: int = 0


class SlowRank(NamedTuple):
    """A rank that the others wait for, and the seconds that it and the median rank work in a step before the ranks
    exchange gradients."""

    rank: int
    seconds: float
    median: float


SLOW_FACTOR, SLOW_SHARE, SLOW_SECONDS = 1.25, 0.05, 10.0
"""A rank is slow if it works this many times as long as the median rank, the difference is this share of a step, and
that lasts this long."""

MEDIAN_STEPS = 1000
"""The run's speed is the median time of this many last steps."""

BLOCK_SECONDS = 5.0
"""Target duration of a block; its rows are in the run folder within as long again."""


@dataclass
class Recorder:
    """Collects the metrics of steps and turns them into rows.

    `units`: tokens or images in a global batch. `flops`: floating-point operations of a global batch; `peak_flops`:
    FLOP/s of all devices together; None if unknown. `micro_batch`: the size at the start, in samples.
    """

    ranks: Ranks
    watch: Stopwatch
    unit: str
    units: int
    flops: float | None = None
    peak_flops: float | None = None
    micro_batch: int = 0
    _steps: list[StepRecord] = field(default_factory=list)
    _first_losses: list[float] = field(default_factory=list)
    _last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=MEAN_STEPS))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_STEPS))
    _block_end: int = 1
    median_seconds: float = 0.0
    """Median duration of a step, the same on all ranks; 0 before the first block."""
    recent_seconds: float = 0.0
    """The larger of the median and the duration of the last block's last step."""
    slow: SlowRank | None = None
    """The slow rank, once: set by the block that finds another one than before."""
    _slow_since: tuple[int, float] | None = None
    _last_slow: int | None = None

    def add(self, step: StepRecord) -> None:
        self._steps.append(step)

    def ends_block(self, step: int, every: int) -> bool:
        """Return whether the block ends with this step; the same on all ranks."""
        return step % every == 0 or step >= self._block_end

    def take_block(self, *, alone: bool = False) -> list[Row]:
        """Return the rows of the steps since the last block, with losses averaged over the ranks. Collective.

        `alone`: after an error, when other ranks may have exited. The losses are then this rank's, and the rows have
        `ranks: 1`.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return []
        times, memory = self.watch.read(), round(memory_gb(self.ranks.device), 4)
        means = self._means(steps, times, alone)
        rows: list[Row] = []
        for step, (loss, grad_norm, mean_seconds, micro_batch, timed), (seconds, ended, _) in zip(
            steps, means, times, strict=True
        ):
            rows.append(self._row(step, loss, grad_norm, seconds) | {"memory_gb": memory, "time": ended})
            if 0 < micro_batch < self.micro_batch:
                rows[-1]["micro_batch"] = int(micro_batch)
            if isfinite(grad_norm):
                self._add_loss(loss)
            if timed or not self._seconds:
                self._seconds.append(mean_seconds)  # the mean of all ranks, which must decide alike
        last_seconds = means[-1][2]
        self.median_seconds = median(self._seconds)  # compilation and outliers don't change it
        self.recent_seconds = max(self.median_seconds, last_seconds)
        self._block_end = steps[-1].step + max(1, int(BLOCK_SECONDS / last_seconds))
        return [row | {"ranks": 1} for row in rows] if alone and self.ranks.world > 1 else rows

    def _means(self, steps: Sequence[StepRecord], times: Times, alone: bool) -> list[list[float]]:
        """Return for each step, over all ranks: mean loss, gradient norm and seconds; the smallest micro-batch; 1 if
        timed on all ranks, else 0.

        Sums are exact (fsum), so that no bit depends on the length of a block, which depends on the clock.
        """
        own = torch.stack([torch.stack([step.loss, step.grad_norm]) for step in steps])
        own = own.to(torch.float32 if self.ranks.device.type == "mps" else torch.float64)  # an Apple GPU has no float64
        host = [[time[0], step.micro_batch, step.timed, time[2]] for step, time in zip(steps, times, strict=True)]
        own = torch.cat([own, torch.tensor(host, dtype=own.dtype, device=own.device)], dim=1)
        by_rank = [own.tolist()] if alone else [values.tolist() for values in gather_tensors(self.ranks, own)]
        if len(by_rank) > 1:
            self._note_slow_rank([median(step[5] for step in rank) for rank in by_rank], *times[-1][:2])
        return [
            [*map(_mean, columns[:3]), *map(min, columns[3:5])]
            for columns in (list(zip(*step, strict=True)) for step in zip(*by_rank, strict=True))
        ]

    def _note_slow_rank(self, work: Sequence[float], step_seconds: float, now: float) -> None:
        """Set `slow` if one rank has worked longer than the others for some time. `work`: seconds by rank."""
        seconds, usual = max(work), median_low(work)
        rank = work.index(seconds)
        if seconds < max(SLOW_FACTOR * usual, usual + SLOW_SHARE * step_seconds):
            self._slow_since = None
        elif self._slow_since is None or self._slow_since[0] != rank:
            self._slow_since = (rank, now)
        elif now - self._slow_since[1] >= SLOW_SECONDS and rank != self._last_slow:
            self.slow, self._last_slow = SlowRank(rank, seconds, usual), rank

    def _row(self, step: StepRecord, loss: float, grad_norm: float, seconds: float) -> Row:
        values = {"step": step.step, "loss": loss, "lr": step.lr, "grad_norm": grad_norm}
        speed = {f"{self.unit}_per_s": self.units / seconds, "step_s": seconds, "data_s": step.data_seconds}
        skipped = {} if isfinite(grad_norm) else {"skipped": 1}
        return values | speed | self._mfu(seconds) | skipped

    def _mfu(self, seconds: float) -> dict[str, float]:
        """Return the model FLOP/s utilisation: the share of the devices' dense peak. Empty if either is unknown."""
        return {"mfu": self.flops / seconds / self.peak_flops} if self.flops and self.peak_flops else {}

    def _add_loss(self, loss: float) -> None:
        if len(self._first_losses) < MEAN_STEPS:
            self._first_losses.append(loss)
        self._last_losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what the final summary needs from the steps so far."""
        return {"first": list(self._first_losses), "last": list(self._last_losses), "seconds": list(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first_losses = list(state["first"])
        self._last_losses.extend(state["last"])
        self._seconds.extend(state["seconds"])

    def summary(self, steps_done: int) -> dict[str, Any]:
        """Return the mean loss of the first and the last steps, and the median speed."""
        seconds = median(self._seconds)
        first, last, steps = first_and_last_means(self._first_losses, [*self._last_losses], steps_done)
        losses = {"train_loss_first": first, "train_loss_last": last, "train_loss_steps": steps}
        return losses | {f"{self.unit}_per_s": self.units / seconds} | self._mfu(seconds)


def first_and_last_means(first: Sequence[float], last: Sequence[float], steps_done: int) -> tuple[float, float, int]:
    """Return the mean of the first and of the last losses of a run, and the number of steps in each mean.

    The number is MEAN_STEPS at most, and half of the steps if the means would overlap; in a run of up to MEAN_STEPS
    steps both are the mean of all.
    """
    steps = min(MEAN_STEPS, steps_done if steps_done <= MEAN_STEPS else steps_done // 2)
    return _mean(first[:steps]), _mean(last[-steps:]), steps


def _mean(values: Collection[float]) -> float:
    """Return NaN if there are no values or one isn't finite: infinities of both signs have no sum."""
    return fsum(values) / len(values) if values and all(map(isfinite, values)) else nan

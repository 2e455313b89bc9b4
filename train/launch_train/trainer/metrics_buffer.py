"""The steps' numbers, kept on the device until a block of them is read: asking for each loss would stop the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, nan
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launch_train.common.contract import MEAN_STEPS
from launch_train.common.step_timer import Stopwatch, Times, memory_gb
from launch_train.distributed.process_group import Ranks, gather_tensors
from launch_train.telemetry.rows import Row


class Step(NamedTuple):
    """One that was done, or queued: `loss` is this rank's, on the device; `waited` the seconds that it waited for its
    batch; `counts` whether its time is one of training alone, here; `micro` the samples of its micro-batches."""

    number: int
    rate: float
    loss: Tensor
    norm: Tensor
    waited: float = 0.0
    counts: bool = True
    micro: int = 0


TIMED = 1000
"""Steps, the last ones, whose median time is the run's speed."""

FRESH_SECONDS = 5.0
"""A block of steps is closed when it has lasted so long: as much again, and its rows are in the run folder."""


@dataclass
class Recorder:
    """Collects steps. `units` is tokens or images in one global batch; `flops` those of a global batch, and `peak` the
    FLOP/s of all devices together, where they are known; `micro` the samples of a micro-batch as they were chosen."""

    ranks: Ranks
    watch: Stopwatch
    unit: str
    units: int
    flops: float | None = None
    peak: float | None = None
    micro: int = 0
    _steps: list[Step] = field(default_factory=list)
    _first: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=MEAN_STEPS))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED))
    _due: int = 1
    usual: float = 0.0
    """Seconds that a step usually takes, as all ranks know it; 0 before the first block."""
    lately: float = 0.0
    """The same, or more if steps have become longer: as long as the last one of the last block."""

    def add(self, step: Step) -> None:
        """A step that was done, or queued."""
        self._steps.append(step)

    def due(self, step: int, every: int) -> bool:
        """Whether the block ends with this step: all ranks say the same."""
        return step % every == 0 or step >= self._due

    def block(self, *, alone: bool = False) -> list[Row]:
        """Rows of the steps since the last block. All ranks call it together: the losses become global.

        `alone`: after an error, when the others may be gone; the losses are then this rank's, and the rows say so.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return []
        times, memory = self.watch.read(), round(memory_gb(self.ranks.device), 4)
        numbers = self._means(steps, times, alone)
        rows: list[Row] = []
        for step, (loss, norm, usual, micro, counts), (seconds, ended) in zip(steps, numbers, times, strict=True):
            rows.append(self._row(step, loss, norm, seconds) | {"memory_gb": memory, "time": ended})
            if 0 < micro < self.micro:
                rows[-1]["micro_batch"] = int(micro)
            if isfinite(norm):
                self._remember(loss)
            if counts or not self._seconds:
                self._seconds.append(usual)  # not this rank's own: the ranks must take turns together
        self.usual = self.step_seconds()
        self.lately = max(self.usual, numbers[-1][2])
        self._due = steps[-1].number + max(1, int(FRESH_SECONDS / numbers[-1][2]))
        return [row | {"ranks": 1} for row in rows] if alone and self.ranks.world > 1 else rows

    def _means(self, steps: Sequence[Step], times: Times, alone: bool) -> list[list[float]]:
        """Of each step, the same on all ranks: the mean loss, gradient norm and seconds; the least micro-batch, and
        whether it counts on all. Added exactly (fsum), so that no bit depends on how many steps a block has, which is a
        matter of the clock."""
        own = torch.stack([torch.stack([step.loss, step.norm]) for step in steps]).to(_exact(self.ranks.device))
        host = [[seconds, step.micro, step.counts] for step, (seconds, _) in zip(steps, times, strict=True)]
        own = torch.cat([own, torch.tensor(host, dtype=own.dtype, device=own.device)], dim=1)
        all_of = [own.tolist()] if alone else [values.tolist() for values in gather_tensors(self.ranks, own)]
        return [
            [*map(_mean, each[:3]), *map(min, each[3:])]
            for each in (list(zip(*step, strict=True)) for step in zip(*all_of, strict=True))
        ]

    def _row(self, step: Step, loss: float, norm: float, seconds: float) -> Row:
        speed = {f"{self.unit}_per_s": self.units / seconds, "step_s": seconds, "data_s": step.waited}
        skipped = {} if isfinite(norm) else {"skipped": 1}
        numbers = {"step": step.number, "loss": loss, "lr": step.rate, "grad_norm": norm}
        return numbers | speed | self._mfu(seconds) | skipped

    def _mfu(self, seconds: float) -> dict[str, float]:
        """Model FLOP/s as a share of the devices' dense peak. Left out where the peak or the formula is unknown."""
        return {"mfu": self.flops / seconds / self.peak} if self.flops and self.peak else {}

    def _remember(self, loss: float) -> None:
        if len(self._first) < MEAN_STEPS:
            self._first.append(loss)
        self._last.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """What the summary at the end needs of the steps so far."""
        return {"first": list(self._first), "last": list(self._last), "seconds": list(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._first = list(state["first"])
        self._last.extend(state["last"])
        self._seconds.extend(state["seconds"])

    def step_seconds(self) -> float:
        """The median of the last steps: compilation and hiccups don't count."""
        return median(self._seconds)

    def totals(self, done: int) -> dict[str, Any]:
        """The loss at both ends of `done` steps and the median speed."""
        seconds = self.step_seconds()
        first, last, steps = ends(self._first, [*self._last], done)
        losses = {"train_loss_first": first, "train_loss_last": last, "train_loss_steps": steps}
        return losses | {f"{self.unit}_per_s": self.units / seconds} | self._mfu(seconds)


def ends(first: Sequence[float], last: Sequence[float], done: int) -> tuple[float, float, int]:
    """The mean loss of the first and of the last steps of `done`, and of how many: MEAN_STEPS at most, and of half of
    them where these would overlap; all of them in a run no longer than MEAN_STEPS."""
    steps = min(MEAN_STEPS, done if done <= MEAN_STEPS else done // 2)
    return _mean(first[:steps]), _mean(last[-steps:]), steps


def _exact(device: torch.device) -> torch.dtype:
    """The numbers that are gathered: a Mac's GPU has no float64, and is alone."""
    return torch.float32 if device.type == "mps" else torch.float64


def _mean(values: Collection[float]) -> float:
    """No number where one of them isn't finite (infinities of both signs have no sum), or where there are none."""
    return fsum(values) / len(values) if values and all(map(isfinite, values)) else nan

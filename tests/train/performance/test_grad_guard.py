"""Steps whose gradients are not finite: nothing changes, they are counted, and too many end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch_train import checkpoint, models
from launch_train.common.config import Optimizer
from launch_train.common.errors import NonFiniteError
from launch_train.performance import optimizer as optim
from launch_train.performance.grad_guard import GradGuard
from tests.train import trials
from tests.train.trainer.test_train import events, read, run, steps

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG: dict[str, Any] = {"data": "synthetic", "steps": 8, "batch_size": 8, "eval": {"every": 0}}


class Breaks(nn.Module):
    """The loss of some passes (from 1) is no number."""

    def __init__(self, inner: nn.Module, when: Callable[[int], bool]) -> None:
        super().__init__()
        self.inner, self.when, self.passes = inner, when, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.passes += 1
        loss: Tensor = self.inner(x, y)
        return loss * (torch.nan if self.when(self.passes) else 1.0)


def broken(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    build = models.build_model
    monkeypatch.setattr(models, "build_model", lambda config, source: Breaks(build(config, source), when))


def test_a_skipped_step_is_told_with_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda number: number == 3)
    rows = run(tmp_path / "run", CONFIG)
    (told,) = events(rows, "non_finite")
    assert told["step"] == 3
    assert len(told["samples"]) == 8
    assert [row["step"] for row in steps(rows) if row.get("skipped")] == [3]
    assert steps(rows)[2]["loss"] is None
    (end,) = events(rows, "end")
    assert end["skipped_steps"] == 1
    assert end["train_loss_last"] > 0


def test_a_scaler_asks_no_optimizers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that of one that isn't fused."""
    monkeypatch.setattr(optim, "FUSED", frozenset())
    model = nn.Linear(3, 3)
    optimizer = optim.build_optimizer(model, Optimizer(name="sgd"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = model.weight.detach().clone()
    for factor, changed in ((torch.inf, False), (1.0, True), (torch.inf, True)):
        scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "item", None)
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before) is not changed
        assert bool(model.weight.isfinite().all())


def test_a_preempted_run_counts_what_was_skipped_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the block of steps that the preemption ends."""
    folder, build = tmp_path / "run", models.build_model
    more = {**CONFIG, "log_every": 100, "micro_batch_size": 8, "optimizer": {"warmup_steps": 0}}
    broken(monkeypatch, lambda number: number == 3)
    trials.preempted(folder, 4, **more)
    assert checkpoint.load(str(folder))["guard"] == {"in_a_row": 0, "skipped": 1}
    monkeypatch.setattr(
        models, "build_model", lambda config, source: Breaks(build(config, source), lambda number: False)
    )
    trials.train(folder, 1, **more)
    rows = read(folder)
    assert [event["step"] for event in events(rows, "non_finite")] == [3]
    assert events(rows, "end")[0]["skipped_steps"] == 1


@pytest.mark.parametrize("log_every", [1, 8])
def test_too_many_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int) -> None:
    """Steps that were queued behind the last one are not reported: the run ended before them."""
    broken(monkeypatch, lambda number: number > 2)
    with pytest.raises(NonFiniteError, match="step 6: the gradients were not finite in 4 steps in a row"):
        run(tmp_path / "run", {**CONFIG, "non_finite": 3, "log_every": log_every})
    rows = read(tmp_path / "run")
    assert [event["step"] for event in events(rows, "non_finite")] == [3, 4, 5, 6]
    assert [row["step"] for row in steps(rows)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("masked", [True, False])
def test_a_mean_over_an_empty_mask_is_named_as_a_cause_where_targets_may_not_count(masked: bool) -> None:
    with pytest.raises(NonFiniteError) as caught:
        GradGuard(0, masked=masked).check([{"step": 1, "skipped": 1}])
    assert ("(sum, count)" in str(caught.value)) is masked

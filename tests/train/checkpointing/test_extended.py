"""A resume may extend `steps`, and change what alters no past step; anything else is another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch_train.common.config import is_resumable
from launch_train.common.errors import UsageError
from launch_train.performance.optimizer import learning_rate
from tests.train.trials import differences, losses, preempted, read, train

pytestmark = pytest.mark.usefixtures("one_thread")

END, LONGER = 12, 20
CONSTANT = {"lr": 1e-2, "min_lr": 1e-2, "warmup_steps": 3}
COSINE = {"lr": 1e-2}
FEW: dict[str, Any] = {"eval": {"every": 0}}


def test_a_constant_rate_goes_on_as_if_it_had_always_been_longer(tmp_path: Path) -> None:
    config = {**FEW, "optimizer": CONSTANT}
    train(tmp_path / "whole", **config, steps=LONGER)
    train(tmp_path / "run", **config, steps=END)
    before = losses(tmp_path / "run")
    train(tmp_path / "run", generation=1, **config, steps=LONGER)
    assert {step: losses(tmp_path / "run")[step] for step in before} == before
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert differences(tmp_path / "whole", tmp_path / "run") == set()


def test_a_cosine_follows_the_new_end_from_there_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the default warm-up, which is a tenth of the steps: another one for a longer run."""
    train(tmp_path / "whole", **FEW, optimizer=COSINE, steps=END)
    preempted(tmp_path / "run", END // 2 - 1, **FEW, optimizer=COSINE, steps=END)
    capfd.readouterr()
    train(tmp_path / "run", generation=1, **FEW, optimizer=COSINE, steps=LONGER)
    said = capfd.readouterr().out
    assert f"steps: {END} before, {LONGER} now" in said
    assert "follows the new end" in said
    whole, found = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert [*found] == [*range(1, LONGER + 1)]
    assert all(found[step] == whole[step] for step in range(1, END // 2 + 1))
    from launch_train.common.config import parse

    rates = {row["step"]: row["lr"] for row in read(tmp_path / "run").rows}
    for steps, part in ((END, range(1, END // 2 + 1)), (LONGER, range(END // 2 + 1, LONGER + 1))):
        settings = parse({"steps": steps, "optimizer": COSINE}).optimizer
        assert all(rates[step] == pytest.approx(learning_rate(step, steps, settings)) for step in part)


def test_a_preemption_after_that_changes_no_bit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, **FEW, optimizer=COSINE, steps=END)
    train(tmp_path / "one", generation=1, **FEW, optimizer=COSINE, steps=LONGER)
    preempted(tmp_path / "two", END + 2, generation=1, **FEW, optimizer=COSINE, steps=LONGER)
    train(tmp_path / "two", generation=2, **FEW, optimizer=COSINE, steps=LONGER)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert differences(tmp_path / "one", tmp_path / "two") == set()


def test_intervals_may_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    preempted(tmp_path / "run", 5, steps=END)
    other = {"eval": {"every": 4, "batches": 1}, "log_every": 3, "checkpoint": {"keep": {"last": 1}}, "monitor": 0}
    train(tmp_path / "run", generation=1, steps=END, **other)
    said = capfd.readouterr().out
    for key in ("eval", "log_every", "checkpoint", "monitor"):
        assert f"changed: {key}: " in said
    assert "follows the new end" not in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": LONGER, "optimizer": {"lr": 2e-2}}, "optimizer"),
        ({"steps": LONGER, "optimizer": {"lr": 1e-2, "warmup_steps": 7}}, "optimizer"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = {**FEW, "optimizer": COSINE, "steps": END}
    preempted(tmp_path / "run", 2, **config)
    with pytest.raises(UsageError, match=f"belongs to another spec: {named} was"):
        train(tmp_path / "run", generation=1, **{**config, **change})


def test_what_the_launcher_asks() -> None:
    assert is_resumable({}, {"steps": 600})
    assert is_resumable({"steps": 300}, {"eval": {"every": 7}, "log_every": 1, "monitor": 0})
    assert is_resumable({"optimizer": {"warmup_steps": 5}}, {"optimizer": {"warmup_steps": 5}, "steps": 400})
    assert not is_resumable({}, {"steps": 299})
    assert not is_resumable({"steps": 100}, {"steps": 300, "optimizer": {"warmup_steps": 20}})
    assert not is_resumable({}, {"steps": 600, "seed": 1})
    assert not is_resumable({}, {"precision": "bf16"})
    assert not is_resumable({}, {"data": "synthetic"})
    assert not is_resumable({"steps": "many"}, {})

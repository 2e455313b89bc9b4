"""Every target that counts weighs the same, however a global batch is cut into micro-batches and among ranks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from launch_train.common.config import parse
from launch_train.common.errors import UsageError
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
from launch_train.models.user_model import checked
from tests.train import weighing
from tests.train.conftest import on_one_thread
from tests.train.forked import Forked
from tests.train.sharing import Session, on_two_ranks
from tests.train.trainer.test_train import events, read, steps

WITHIN = 1e-5

COSTLY = pytest.mark.slow(turn=1)
"""Of tests that need the runs of `base`, some 50 s of CPU time. tests/train/checkpointing/test_resume_loader.py always
compares two micro-batches."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    base = tmp_path_factory.mktemp("weighing")
    on_two_ranks(forked, "tests.train.weighing", base)
    with on_one_thread():
        ranks = Ranks(store=HashStore(), barriers=itertools.count())
        weighing.runs(Session(base, ranks, weighing.SHORT))
    return base


def numbers(folder: Path) -> list[float]:
    """Loss and gradient norm of each step, and the held-out loss."""
    rows = read(folder)
    found = [row[name] for row in steps(rows) for name in ("loss", "grad_norm")]
    assert len(steps(rows)) in (3, 12)
    return [*found, *(event["loss"] for event in events(rows, "eval"))]


@COSTLY
@pytest.mark.parametrize("name", sorted(weighing.CASES.keys() - {"two"}))
def test_neither_micro_batch_nor_ranks_change_a_step(base: Path, name: str) -> None:
    whole = numbers(base / f"{name}-12x1")
    assert all(map(math.isfinite, whole))
    for world, sizes in weighing.SIZES.items():
        for size in sizes:
            assert numbers(base / f"{name}-{size}x{world}") == pytest.approx(whole, rel=WITHIN), (size, world)


@COSTLY
@pytest.mark.parametrize("name", weighing.FSDP)
def test_nor_does_sharing_the_model_out(base: Path, name: str) -> None:
    assert numbers(base / f"{name}-fsdp-3x2") == pytest.approx(numbers(base / f"{name}-12x1"), rel=WITHIN)


@COSTLY
@pytest.mark.parametrize("name", weighing.COMPILED)
@pytest.mark.parametrize("mode", ["regional", "whole"])
def test_nor_does_the_compiler(base: Path, name: str, mode: str) -> None:
    whole = numbers(base / f"{name}-12x1")
    for world in (1, 2):
        folder = base / f"{name}-{mode}-3x{world}"
        (start,) = events(read(folder), "start")
        assert {one["what"]: one["chosen"] for one in start["choices"]}["compile"] == mode
        assert numbers(folder) == pytest.approx(whole, rel=WITHIN)


@COSTLY
def test_a_rank_without_a_target_that_counts_adds_nothing(base: Path) -> None:
    one, two = numbers(base / "two-2x1"), numbers(base / "two-1x2")
    assert two == pytest.approx(one, rel=WITHIN)
    assert all(map(math.isfinite, two))
    assert 0.0 in two[::2]  # a step in which nothing counts changes nothing


@COSTLY
def test_three_ways_to_say_the_same(base: Path) -> None:
    whole = numbers(base / "mean-12x1")
    for other in ("by-hand", "pair", "inside"):
        assert numbers(base / f"{other}-12x1") == pytest.approx(whole, rel=WITHIN)


@COSTLY
def test_a_count_of_the_users_is_what_the_sum_is_divided_by(base: Path) -> None:
    config = parse({**weighing.SHORT, **weighing.CASES["pair"]})
    _, targets = open_data(config, Ranks()).train(1, slice(0, 12))
    total = numbers(base / "pair-12x1")[0] * int((targets != -100).sum())
    assert numbers(base / "weighted-12x1")[0] == pytest.approx(total / 6, rel=WITHIN)


@pytest.mark.parametrize("count", [None, "12", torch.ones(2)])
def test_a_count_that_is_no_number(count: object) -> None:
    with pytest.raises(UsageError, match="as its count"):
        checked((torch.ones((), requires_grad=True), count), "loss: mine:loss")

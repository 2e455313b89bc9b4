"""Ranks whose parameters or moments come apart: found within a few steps, and never saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launch_train.common.contract import Exit
from launch_train.common.storage import LocalFolder
from launch_train.distributed.process_group import Ranks
from launch_train.runfolder import MANIFEST
from launch_train.trainer.replica_check import (
    ReplicaCheck,
    ReplicaDifference,
    digest,
    find_difference,
    replicated_tensors,
)
from tests.train import flipping
from tests.train.flipping import BAD
from tests.train.forked import Forked
from tests.train.sharing import on_two_ranks
from tests.train.trainer.test_train import events, read, steps

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, 3])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked: Forked
) -> tuple[int, Path]:
    """The number of ranks, and the folder of their runs."""
    base = tmp_path_factory.mktemp("flipping")
    on_two_ranks(forked, "tests.train.flipping", base, request.param)
    return request.param, base


def found(session: tuple[int, Path], name: str) -> dict[str, Any]:
    """The event of the difference. All ranks have ended with it."""
    world, base = session
    exits = [int((base / f"{name}-exit-{rank}").read_text()) for rank in range(world)]
    assert exits == [Exit.DISAGREED] * world
    (event,) = events(read(base / name), "ranks_differ")
    return event


def saved(base: Path) -> list[int]:
    """The steps of the checkpoints."""
    names = LocalFolder(base).list("checkpoints/")
    return sorted(int(match["step"]) for name in names if (match := MANIFEST.match(name)))


def suspects(world: int, rank: int) -> list[int]:
    """Of two ranks nobody knows which one is wrong."""
    return [rank] if world > 2 else [0, 1]


def test_a_flipped_bit_is_found_in_its_step(session: tuple[int, Path]) -> None:
    world, _ = session
    for what, rank in (("parameters", world - 1), ("moments", 0)):
        event = found(session, f"{what}-{rank}")
        assert (event["agreed"], event["step"]) == (BAD - 1, BAD)
        assert event["ranks"] == suspects(world, rank)
        assert event["what"] == what
        assert event["checkpoint"] is None
        assert steps(read(session[1] / f"{what}-{rank}"))[-1]["step"] < BAD + 2


def test_the_last_good_checkpoint_is_named(session: tuple[int, Path]) -> None:
    event = found(session, "saved")
    kept = saved(session[1] / "saved")
    assert kept
    assert max(kept) < BAD
    assert int(re.search(r"step-(\d+)", event["checkpoint"])[1]) == max(kept)  # type: ignore[index]  # it matches


@pytest.mark.parametrize("name", ["before-save", "at-the-end", "preempted"])
def test_nothing_is_saved_on_which_the_ranks_do_not_agree(session: tuple[int, Path], name: str) -> None:
    """Whatever the interval between two comparisons."""
    event = found(session, name)
    assert event["agreed"] < BAD <= event["step"]
    assert event["ranks"] == suspects(session[0], session[0] - 1)
    kept = saved(session[1] / name)
    assert max(kept, default=0) < BAD
    if name == "before-save":
        assert kept
        assert event["step"] < flipping.CONFIG["steps"]


def test_ranks_that_agree_end_well(session: tuple[int, Path]) -> None:
    for name in ("same", "fsdp"):
        assert saved(session[1] / name) == [flipping.CONFIG["steps"]]
        assert not events(read(session[1] / name), "ranks_differ")


def test_with_fsdp_nothing_is_compared(session: tuple[int, Path]) -> None:
    """The start says so."""
    for name, chosen in (("same", None), ("fsdp", "not compared")):
        (start,) = events(read(session[1] / name), "start")
        assert {one["what"]: one["chosen"] for one in start["choices"]}.get("replicas") == chosen


# --- The digest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("strided", [False, True])
def test_each_bit_counts(dtype: torch.dtype, strided: bool) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).to(dtype)
    tensor = tensor.t() if strided else tensor
    before, size = int(digest([tensor, torch.ones(2)], CPU)), tensor.element_size()
    integers = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    for bit in range(8 * size - 1):
        integers[1, 2] ^= 1 << bit
        assert int(digest([tensor, torch.ones(2)], CPU)) != before
        integers[1, 2] ^= 1 << bit
    assert int(digest([tensor, torch.ones(2)], CPU)) == before


def test_changes_of_two_tensors_do_not_cancel() -> None:
    one, other = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert int(digest([one, other], CPU)) != int(digest([one + 1, other - 1], CPU))
    assert int(digest([one, other], CPU)) != int(digest([other, one], CPU))


def test_kinds_of_numbers() -> None:
    several = [torch.ones(2, dtype=torch.complex64), torch.ones((), dtype=torch.bool), torch.zeros(0)]
    assert int(digest(several, CPU)) != int(digest([2 * several[0], *several[1:]], CPU))
    assert int(digest([], CPU)) == 0


def test_parameters_and_moments_are_apart() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert [len(kept) for kept in replicated_tensors(model.parameters(), optimizer, CPU)] == [2, 0]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parameters, moments = replicated_tensors(model.parameters(), optimizer, CPU)
    assert len(parameters) == 2
    assert len(moments) == 6  # two moments and the step of each


# --- The verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ([(1, 2), (1, 2)], None),
        ([(1, 2), (3, 2)], ReplicaDifference(4, 8, (0, 1), "parameters")),
        ([(1, 2), (1, 2), (1, 3)], ReplicaDifference(4, 8, (2,), "moments")),
        ([(1, 2), (1, 2), (7, 3), (9, 2), (1, 2)], ReplicaDifference(4, 8, (2, 3), "parameters and moments")),
        ([(1, 2), (1, 2), (7, 2), (7, 2)], ReplicaDifference(4, 8, (0, 1, 2, 3), "parameters")),
    ],
)
def test_who_differs(digests: list[tuple[int, int]], expected: ReplicaDifference | None) -> None:
    assert find_difference(digests, 4, 8) == expected


def test_one_rank_compares_nothing() -> None:
    replicas = ReplicaCheck(Ranks(), sharded=False)
    assert not replicas.due(1)
    assert replicas.choices == ()
    assert replicas.read(0.5) is None

"""When the ranks have a word with each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from launch_train.distributed.consensus import Agreement, StepVote
from launch_train.distributed.process_group import Ranks


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What this rank has said; the other one wants nothing."""
    said: list[list[int]] = []

    def all_reduce(flags: torch.Tensor, op: dist.ReduceOp.RedOpType, _group: object, async_op: bool) -> SimpleNamespace:
        said.append(flags.tolist())
        flags.copy_({dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}[op](flags, flags * 0))
        return SimpleNamespace(wait=lambda: async_op)

    monkeypatch.setattr(dist, "new_group", lambda **_: object())
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return said


@pytest.mark.parametrize(
    ("usual", "talked", "heard"), [(0.0, 12, 2), (0.3, 12, 2), (0.06, 3, 8), (0.001, 0, None), (0.6, 12, 1)]
)
def test_short_steps_have_a_word_now_and_then(
    talks: list[list[int]], usual: float, talked: int, heard: int | None
) -> None:
    agreement = Agreement(Ranks(world=2))
    agreed = [agreement.vote(StepVote(stop=True), usual) for _ in range(12)]
    assert len(talks) == talked
    assert next((number for number, one in enumerate(agreed, start=1) if one.stop), None) == heard
    assert all(said == [1, 0, 0] for said in talks)


def test_what_was_wished_once_between_two_turns_is_not_lost(talks: list[list[int]]) -> None:
    """An interval's save is wished for at one step only."""
    agreement = Agreement(Ranks(world=2))
    agreed = [agreement.vote(StepVote(save=step == 2), 0.06) for step in range(1, 13)]
    assert talks == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert [number for number, one in enumerate(agreed, start=1) if one.save] == [8]


def test_a_wish_alone_is_granted_at_once() -> None:
    assert Agreement(Ranks()).vote(StepVote(save=True), 0.001) == StepVote(save=True)


def test_what_is_under_way_is_read_before_the_ranks_part(talks: list[list[int]]) -> None:
    agreement = Agreement(Ranks(world=2))
    assert agreement.vote(StepVote(leave=True), 0.0) == StepVote()
    assert agreement.close() == StepVote(leave=True)
    assert agreement.close() == StepVote()

"""Batches of the user's own for models that aren't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from launch_train.data.user_dataset import BatchRequirements, unsuited

TOKENS = BatchRequirements("gpt", "tokens", 10, 4)
IMAGES = BatchRequirements("resnet50", "images", 3)


def ints(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("batch", "requirements"),
    [
        ((ints([0, 9]), ints([9, 0])), TOKENS),
        ((ints([0, 9]).int(), ints([-100, 9])), TOKENS),
        (({"input_ids": ints([1, 2]), "attention_mask": ints([1, 99])}, ints([1, 2])), TOKENS),
        (({"inputs_embeds": torch.zeros(1, 2, 8)}, ints([1, 2])), TOKENS),
        ((ints([0, 9_999]), ints([1, 2])), TOKENS._replace(known=None)),
        ((ints([0] * 99), ints([1] * 99)), TOKENS._replace(most=None)),
        ((ints([0, 9]), torch.zeros(1)), TOKENS._replace(judges=False)),
        ((torch.zeros(2, 3, 8, 8), torch.tensor([0, 2])), IMAGES),
        ((torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16), torch.tensor([1])), IMAGES),
    ],
)
def test_what_a_model_takes(batch: Any, requirements: BatchRequirements) -> None:
    assert unsuited(batch, requirements) is None


@pytest.mark.parametrize(
    ("batch", "requirements", "sample", "why"),
    [
        ((ints([1, 2], [3, 10]), ints([1, 2], [3, 4])), TOKENS, 1, "has the token 10, and gpt accepts 0 to 9"),
        ((ints([1, 2], [3, -1]), ints([1, 2], [3, 4])), TOKENS, 1, "has the token -1, and gpt accepts 0 to 9"),
        ((ints([1, 2]), ints([1, 10])), TOKENS, 0, "has the target: the token 10, and gpt accepts 0 to 9"),
        ((ints([1, 2]), torch.tensor([1])), TOKENS, 0, "has the target int64[], and gpt takes int64[tokens]"),
        ((ints([1, 2, 3, 4, 5]), ints([1] * 5)), TOKENS, 0, "has 5 tokens, and gpt takes 4 at most"),
        ((torch.zeros(2, 3), ints([1, 2])), TOKENS, 0, "is float32[3], and gpt takes int64[tokens]"),
        (({"input_ids": ints([1, 10])}, ints([1, 2])), TOKENS, 0, "has the token 10, and gpt accepts 0 to 9"),
        ((ints([1, -3]), ints([1, 2])), TOKENS._replace(known=None), 0, "has the token -3, and gpt accepts 0 or more"),
        (
            (torch.zeros(1, 8, 8, 3), torch.tensor([1])),
            IMAGES,
            0,
            "is float32[8, 8, 3], and resnet50 takes float32[3, height, width]",
        ),
        (
            (torch.zeros(2, 3, 8, 8), torch.tensor([2, 3])),
            IMAGES,
            1,
            "has the target: the class 3, and resnet50 accepts 0 to 2",
        ),
    ],
)
def test_what_it_does_not_take(batch: Any, requirements: BatchRequirements, sample: int, why: str) -> None:
    assert unsuited(batch, requirements) == (sample, why)

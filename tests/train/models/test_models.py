from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launch_train.common.config import Bert, Config, Gpt, Optimizer, ResNet, parse
from launch_train.common.errors import UsageError
from launch_train.models import blocks, build_model, flops_per_sample
from launch_train.models.gpt import GPT
from launch_train.models.introspection import count_flops
from launch_train.models.layers import flops_per_token, losses
from launch_train.models.resnet import Bottleneck, ResNetModel
from launch_train.performance import optimizer as optim

SMALL = Gpt(n_layer=2, n_head=2, n_embd=32, block_size=16)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "count"), [("gpt2-124m", 124_373_760), ("resnet50", 25_557_032)])
def test_models_have_the_published_size(name: str, count: int) -> None:
    with torch.device("meta"):
        assert parameters(build_model(parse({"model": name}))) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_with_biases_and_their_own_vocabulary_they_are_openais(name: str, count: int) -> None:
    config = parse({"model": {"name": name, "bias": True, "vocab_size": 50257}})
    with torch.device("meta"):
        assert parameters(build_model(config)) == count


def test_a_token_sees_nothing_of_the_future() -> None:
    model = GPT(SMALL).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_a_token_sees_the_past_and_its_place() -> None:
    model = GPT(SMALL).eval()
    logits = model(torch.zeros(1, 16, dtype=torch.int64))
    assert not torch.allclose(logits[0, 3], logits[0, 4])


@pytest.mark.parametrize("shape", [SMALL, Bert(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=256)])
def test_a_new_model_guesses_evenly_and_drops_out_in_training_only(shape: Gpt | Bert) -> None:
    torch.manual_seed(0)
    tokens, targets = torch.randint(256, (8, 16)), torch.randint(256, (8, 16))
    model = build_model(Config(model=shape._replace(dropout=0.5)))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert model(tokens, targets).item() == pytest.approx(math.log(256), abs=0.1)


def test_what_goes_into_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    model = GPT(Gpt(n_layer=8, n_embd=128))
    weights = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    assert weights["blocks.3.mlp.out.weight"] == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.3.attention.out.weight"] == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.3.mlp.up.weight"] == pytest.approx(0.02, rel=0.05)


def test_flops_are_nanogpts() -> None:
    """855 MFLOP a token for GPT-2 124M at 1024 (nanoGPT counts the padded vocabulary, and no positions)."""
    config = parse({"model": "gpt2-124m"})
    with torch.device("meta"):
        model = build_model(config)
    flops = flops_per_sample(config, None, model)
    assert flops is not None
    assert flops / 1024 == pytest.approx(855e6, rel=0.001)


def test_resnet_shrinks_an_image_by_32_before_it_is_averaged() -> None:
    model = ResNetModel(ResNet(width=8, num_classes=7)).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert model.stages(model.pool(model.stem(torch.zeros(1, 3, 64, 64)))).shape == (1, 256, 2, 2)


def test_flops_of_resnet_are_the_published_ones() -> None:
    """torchvision's ResNet50_Weights: 4.09 GMAC for an image of 224 x 224."""
    config = parse({"model": "resnet50"})
    with torch.device("meta"):
        flops = flops_per_sample(config, None, build_model(config))
    assert flops is not None
    assert flops / 3 / 2 == pytest.approx(4.09e9, rel=0.001)


def test_what_is_counted_is_what_the_formula_says() -> None:
    """But for LayerNorms and biases, which the formula counts as if they were matrices."""
    model = GPT(SMALL)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    assert count_flops(model, tokens, tokens) == pytest.approx(16 * flops_per_token(SMALL, model), rel=0.02)


def test_counting_leaves_no_trace() -> None:
    model = ResNetModel(ResNet(width=4, num_classes=3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert count_flops(model, torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Keeping(nn.Module):
    """It keeps a mask for the next time, as many models do, where its first batch was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, device=x.device)  # type: ignore[assignment]  # None until the first batch
        loss: torch.Tensor = (self.linear(x) * self.mask).sum()
        return loss


def test_what_a_model_keeps_is_not_that_of_the_count() -> None:
    model = Keeping()
    assert count_flops(model, torch.zeros(1, 4, device="meta")) == count_flops(model, torch.zeros(1, 4)) == 3 * 2 * 16
    assert model.mask is None
    assert not model.linear.weight.is_meta


def test_a_model_that_cannot_be_counted() -> None:
    assert count_flops(GPT(SMALL), torch.zeros(1, 17, dtype=torch.int64)) is None  # longer than its block
    assert count_flops(nn.Identity(), torch.zeros(1)) is None  # it computes nothing


def test_the_blocks_of_our_models() -> None:
    model = GPT(SMALL)
    assert blocks(model) == list(model.blocks)
    assert [type(block) for block in blocks(ResNetModel(ResNet(width=4)))] == 16 * [Bottleneck]


class Experts(nn.Module):
    """A block that has a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(8))
        self.more = nn.ModuleList(Pair() for _ in range(9))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)


def test_the_blocks_of_anyones_model() -> None:
    nested = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([Experts(), Experts(), Experts()]))
    assert [type(block) for block in blocks(nested)] == 3 * [Experts]
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # layers, not blocks
    assert blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert blocks(nn.ModuleList([Pair()])) == []
    assert len(blocks(nn.ModuleList([Pair(), Pair()]))) == 2


@pytest.mark.parametrize(("size", "fits"), [(320, True), (321, False), (None, True)])
def test_a_vocabulary_that_the_data_goes_beyond(size: int | None, fits: bool) -> None:
    source: Any = SimpleNamespace(vocab_size=size)
    config = parse({"model": "bert"})
    with nullcontext() if fits else pytest.raises(UsageError, match=r"model.vocab_size: 320 is too small .* 321"):
        build_model(config, source)


def test_decay_is_for_matrices_only() -> None:
    model = GPT(Gpt(n_layer=1, n_embd=32, bias=True))
    decayed, others = optim.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])  # type: ignore[attr-defined]  # a list of parameters
    assert all(p.dim() == 1 for p in others["params"])  # type: ignore[attr-defined]  # as above
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_a_step_of_the_optimizer_changes_the_model(name: str, kind: type) -> None:
    model = GPT(SMALL)
    optimizer = optim.build_optimizer(model, Optimizer(name=name))
    before = model.tokens.weight.detach().clone()
    model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)).backward()
    optimizer.step()
    assert isinstance(optimizer, kind)
    assert not torch.equal(before, model.tokens.weight)


def test_the_learning_rate_at_its_corners() -> None:
    settings = Optimizer(lr=1.0, min_lr=0.1, warmup_steps=10)
    rates = [optim.learning_rate(step, 110, settings) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.55)
    assert rates[109] == pytest.approx(0.1)
    assert max(rates) == 1.0
    assert min(rates) >= 0.1 - 1e-9


@pytest.mark.parametrize(("steps", "warmup", "last"), [(1, 0, 0.1), (1, 1, 1.0), (5, 5, 1.0), (5, 0, 0.1)])
def test_the_learning_rate_of_runs_that_are_all_warm_up_or_have_none(steps: int, warmup: int, last: float) -> None:
    settings = Optimizer(lr=1.0, min_lr=0.1, warmup_steps=warmup)
    assert optim.learning_rate(steps, steps, settings) == pytest.approx(last)


@pytest.mark.parametrize("model", [{"name": "gpt"}, {"name": "bert"}])
def test_the_loss_is_a_module_of_its_own_of_which_no_checkpoint_knows(model: dict[str, Any]) -> None:
    """It can be compiled alone, and who has the logits comes to the same bits."""
    parsed = parse({"model": {**model, "n_layer": 2, "n_embd": 16, "block_size": 8, "n_head": 2}})
    built = build_model(parsed).eval()
    (loss,) = losses(built)
    assert not any("loss" in name for name in built.state_dict())
    assert loss not in blocks(built)
    tokens, targets = torch.randint(64, (2, 8)), torch.randint(64, (2, 8))
    assert torch.equal(loss(built(tokens), targets), built(tokens, targets))
    expected = nn.functional.cross_entropy(built(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(built(tokens, targets), expected)

from __future__ import annotations

import math

import pytest
import torch

from train import optim
from train.config import Gpt, Optimizer, ResNet, parse
from train.models import build, flops_per_sample
from train.models.gpt import GPT
from train.models.resnet import resnet50

SMALL = Gpt(n_layer=2, n_head=2, n_embd=32, block_size=16)


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "count"), [("gpt2-124m", 124_373_760), ("resnet50", 25_557_032)])
def test_models_have_the_published_size(name: str, count: int) -> None:
    with torch.device("meta"):
        assert parameters(build(parse({"model": name}).model)) == count


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
    shape = parse({"model": {"name": name, "bias": True, "vocab_size": 50257}}).model
    with torch.device("meta"):
        assert parameters(build(shape)) == count


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


def test_a_new_model_knows_nothing() -> None:
    torch.manual_seed(0)
    loss = GPT(SMALL)(torch.randint(256, (8, 16)), torch.randint(256, (8, 16)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_the_head_is_tied_to_the_embedding() -> None:
    model = GPT(SMALL)
    assert model.head.weight is model.tokens.weight


def test_what_goes_into_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    model = GPT(Gpt(n_layer=8, n_embd=128))
    weights = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    assert weights["blocks.3.mlp.out.weight"] == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.3.attention.out.weight"] == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.3.mlp.up.weight"] == pytest.approx(0.02, rel=0.05)


def test_without_bias_there_is_none() -> None:
    assert not [name for name, _ in GPT(SMALL).named_parameters() if "bias" in name]
    with_bias = Gpt(n_layer=1, n_embd=32, bias=True)
    assert len([name for name, _ in GPT(with_bias).named_parameters() if "bias" in name]) == 7


def test_dropout_works_in_training_only() -> None:
    model = GPT(Gpt(n_layer=1, n_embd=32, dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_flops_are_nanogpts() -> None:
    """855 MFLOP a token for GPT-2 124M at 1024 (nanoGPT counts the padded vocabulary, and no positions)."""
    shape = parse({"model": "gpt2-124m"}).model
    with torch.device("meta"):
        model = build(shape)
    flops = flops_per_sample(shape, model)
    assert flops is not None
    assert flops / 1024 == pytest.approx(855e6, rel=0.001)


def test_resnet_shrinks_an_image_by_32_before_it_is_averaged() -> None:
    model = resnet50(ResNet(width=8, num_classes=7)).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert model.stages(model.pool(model.stem(torch.zeros(1, 3, 64, 64)))).shape == (1, 256, 2, 2)  # type: ignore[operator]


def test_decay_is_for_matrices_only() -> None:
    model = GPT(Gpt(n_layer=1, n_embd=32, bias=True))
    decayed, others = optim.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decayed["params"])  # type: ignore[attr-defined]
    assert all(p.dim() == 1 for p in others["params"])  # type: ignore[attr-defined]
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_a_step_of_the_optimizer_changes_the_model(name: str, kind: type) -> None:
    model = GPT(SMALL)
    optimizer = optim.build(model, Optimizer(name=name))
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

"""Which numbers each device computes with, which form of the optimizer it has, and steps that both leave out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from launch_train.common.config import Optimizer, Precision
from launch_train.common.errors import UsageError
from launch_train.performance import optimizer as optim
from launch_train.performance import precision
from launch_train.performance.grad_guard import skip_unless_finite


@pytest.mark.parametrize(
    ("device", "capability", "chosen", "why"),
    [
        ("cuda", (9, 0), "bf16", "Ampere or newer GPU"),
        ("cuda", (8, 0), "bf16", "Ampere or newer GPU"),
        ("cuda", (7, 5), "fp16", "GPU older than Ampere, with tensor cores"),
        ("cuda", (7, 0), "fp16", "GPU older than Ampere, with tensor cores"),
        ("cuda", (6, 1), "fp32", "GPU without tensor cores"),
        ("cpu", None, "fp32", "lower precision is not faster on CPU"),
        ("mps", None, "fp32", "Apple GPU"),
    ],
)
def test_auto_goes_by_the_device(device: str, capability: tuple[int, int] | None, chosen: str, why: str) -> None:
    numbers = precision.choose("auto", device, capability)
    assert precision.choice("auto", numbers, device) == ("precision", chosen, why)
    assert numbers.scales_loss == (chosen == "fp16")


@pytest.mark.parametrize(
    ("asked", "device", "capability", "said"),
    [
        ("tf32", "cpu", None, "tf32 needs a GPU; on a CPU use fp32, bf16 or auto"),
        ("bf16", "cuda", (7, 5), "this GPU doesn't support bf16; use fp16, fp32 or auto"),
        ("bf16", "mps", None, "bf16 is not supported on Apple GPUs; use fp32 or auto"),
        ("fp16", "mps", None, "fp16 is not supported on Apple GPUs; use fp32 or auto"),
    ],
)
def test_what_a_device_cannot_do_is_refused(
    asked: Precision, device: str, capability: tuple[int, int] | None, said: str
) -> None:
    with pytest.raises(UsageError) as error:
        precision.choose(asked, device, capability)
    assert str(error.value) == f"precision: {said}"


def test_what_the_spec_says_holds() -> None:
    numbers = precision.choose("bf16", "cpu")
    assert precision.choice("bf16", numbers, "cpu") == ("precision", "bf16", "set in the spec")
    with precision.autocast(numbers, torch.device("cpu")):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16


# --- The optimizer ----------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A number of each kind that is trained; complex ones have no fused form."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4).to(dtype).reshape(2, 2))

    def forward(self, factor: float) -> Tensor:
        loss: Tensor = (self.weight.abs() ** 2).sum() * factor
        return loss


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(name: str, dtype: torch.dtype, bad: float) -> None:
    """The first one, when there are no moments yet, and a later one: as if they had not been."""

    def trained(*factors: float) -> list[Tensor]:
        model = Turned(dtype)
        optimizer = optim.build_optimizer(model, Optimizer(name=name, lr=0.1))
        for factor in factors:
            model(factor).backward()
            norm = torch.stack([p.grad.abs().max() for p in model.parameters() if p.grad is not None]).max()
            skip_unless_finite(optimizer, norm)
            optimizer.step()
            optimizer.zero_grad()
        moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return [model.weight.detach(), *moments]

    plain, skipping = trained(1.0, 2.0), trained(bad, 1.0, bad, 2.0)
    assert len(plain) > 1
    assert all(torch.equal(one, other) for one, other in zip(plain, skipping, strict=True))
    assert not torch.equal(plain[0], trained(1.0)[0])


def form(dtype: torch.dtype, settings: Optimizer) -> tuple[str, str, str]:
    model = Turned(dtype)
    return optim.choice(optim.build_optimizer(model, settings), settings.fused, model)


def test_the_form_of_the_optimizer_is_said() -> None:
    def said(dtype: torch.dtype, name: str) -> tuple[str, str, str]:
        return form(dtype, Optimizer(name=name))

    assert said(torch.float32, "adamw") == ("optimizer", "fused AdamW", "few kernels for all parameters")
    assert said(torch.complex64, "sgd") == ("optimizer", "foreach SGD", "complex numbers have no fused form")


@pytest.mark.parametrize(("fused", "chosen"), [(True, "fused AdamW"), (False, "foreach AdamW")])
def test_the_spec_may_say_the_form(fused: bool, chosen: str) -> None:
    assert form(torch.float32, Optimizer(fused=fused)) == ("optimizer", chosen, "set in the spec")


def test_what_is_not_fused_holds_copies_of_all_that_it_changes() -> None:
    for name, fused, other in (("adamw", 2, 6), ("sgd", 1, 4)):
        for asked, numbers in ((True, fused), (False, other)):
            settings = Optimizer(name=name, fused=asked)
            assert (
                optim.numbers_per_parameter(optim.build_optimizer(Turned(torch.float32), settings), settings) == numbers
            )


def test_a_form_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"optimizer\.fused: true is not available: complex numbers have no fused form"
    ):
        form(torch.complex64, Optimizer(fused=True))
    assert form(torch.complex64, Optimizer(name="sgd", fused=False))[2] == "set in the spec"


def test_where_nothing_may_be_skipped_no_copies_are_made() -> None:
    model = Turned(torch.complex64)
    optimizer = optim.build_optimizer(model, Optimizer())
    model(1.0).backward()
    optimizer.step()
    assert not torch.equal(model.weight, Turned(torch.complex64).weight)

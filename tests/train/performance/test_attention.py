"""The kernel that attention is computed by."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from launch_train.common.config import Attention, Config
from launch_train.common.errors import UsageError
from launch_train.performance import attention
from tests.train.trainer.test_train import read
from tests.train.trials import CONFIG, losses, train


def computed(asked: Attention, device: str = "cpu", dropout: float = 0.0) -> str:
    """The operator whose backward pass would come."""
    with attention.use_kernel(asked, device):
        q = torch.randn(1, 2, 8, 16, requires_grad=True)
        return str(scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True).grad_fn)


@pytest.mark.parametrize(("asked", "flash"), [("auto", True), ("flash", True), ("math", False)])
def test_it_is_the_one_that_is_asked_for_and_only_inside(asked: Attention, flash: bool) -> None:
    assert ("FlashAttention" in computed(asked)) is flash
    assert "FlashAttention" in computed("auto")


@pytest.mark.parametrize(
    ("asked", "device", "right"),
    [("efficient", "cpu", "auto or flash or math"), ("math", "mps", "auto")],
)
def test_a_device_without_it_is_refused(asked: Attention, device: str, right: str) -> None:
    with pytest.raises(UsageError) as caught:
        computed(asked, device)
    assert str(caught.value) == f"attention: {asked} is not available on {device}; use {right}"


def test_what_it_does_not_compute_is_told_in_a_line(recwarn: pytest.WarningsRecorder) -> None:
    why = "Both fused kernels do not support non-zero dropout"
    with pytest.raises(UsageError, match=f"^attention: flash doesn't support this model's attention: {why}; use auto$"):
        computed("flash", dropout=0.5)
    assert not recwarn


@attention.use_kernel("flash", "cpu")
def fails() -> None:
    warnings.warn("a warning of yours: the attention kernel", stacklevel=1)
    raise RuntimeError("something else")


def test_other_errors_and_warnings_pass() -> None:
    with pytest.raises(RuntimeError, match="something else"), pytest.warns(UserWarning, match="of yours"):
        fails()


@pytest.mark.parametrize(
    ("asked", "exact", "device", "chosen"),
    [
        ("auto", None, "cuda", "auto"),
        ("auto", False, "cuda", "auto"),
        ("auto", True, "cuda", "math"),
        ("math", True, "cuda", "math"),
        ("flash", None, "cuda", "flash"),
        ("flash", False, "cuda", "flash"),
        ("auto", True, "cpu", "auto"),
        ("flash", True, "cpu", "flash"),
        ("auto", True, "mps", "auto"),
    ],
)
def test_the_same_bits_on_a_gpu_take_the_one_kernel_that_gives_them(
    asked: Attention, exact: bool | None, device: str, chosen: Attention
) -> None:
    """torch makes flash and efficient deterministic only where all that isn't raises an error; cuDNN's never is."""
    config = Config()._replace(attention=asked, deterministic=exact)
    assert attention.choose_kernel(config, device) == chosen
    said = attention.choices(config, device)
    assert [one.chosen for one in said] == ([] if chosen == "auto" else [chosen])
    assert all(("deterministic" in one.why) == (asked != chosen) for one in said)


@pytest.mark.parametrize("asked", ["flash", "efficient", "cudnn"])
def test_the_same_bits_with_another_kernel_are_refused(asked: Attention) -> None:
    with pytest.raises(UsageError, match=f"attention: {asked} .*deterministic.*math"):
        attention.choose_kernel(Config()._replace(attention=asked, deterministic=True), "cuda")


@pytest.mark.usefixtures("one_thread")
def test_a_run_says_what_it_was_told_and_learns_alike(tmp_path: Path) -> None:
    model = {**CONFIG["model"], "dropout": 0.0}  # with dropout torch has no other on a CPU
    more = {"model": model, "steps": 3, "eval": {"every": 0}, "optimizer": {}}
    for asked in ("auto", "math"):
        train(tmp_path / asked, 0, attention=asked, **more)
    said = {(one["what"], one["chosen"]) for one in read(tmp_path / "math")[0]["choices"]}
    assert ("attention", "math") in said
    assert losses(tmp_path / "math") == pytest.approx(losses(tmp_path / "auto"), rel=1e-5)
    made = [read(tmp_path / asked)[-1]["parameters_sha256"] for asked in ("auto", "math")]
    assert made[0] != made[1]  # another kernel adds in another order

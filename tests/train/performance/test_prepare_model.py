"""What makes a model train faster, or in less memory, and never to other results: checkpoints of activations, the order
of pixels, DDP's buckets and the parameters that it waits for in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from launch_train import models
from launch_train.common.config import Config, parse
from launch_train.common.errors import UsageError
from launch_train.distributed.process_group import Ranks
from launch_train.performance import activation_checkpointing, memory_format, prepare_model
from launch_train.performance.precision import POLICIES
from launch_train.trainer.build import set_deterministic
from tests.train.trainer.test_determinism import losses
from tests.train.trainer.test_train import read, steps
from tests.train.trials import differences, preempted, train

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
GPT = {"model": {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 16, "dropout": 0.2}}
RESNET = {"model": {"name": "resnet50", "width": 4, "num_classes": 4, "image_size": 32}, "data": "synthetic"}


def batch(config: Config) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if config.model.name == "resnet50":
        return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 4, (4,), generator=generator)
    return tuple(torch.randint(0, 256, (4, 16), generator=generator) for _ in range(2))  # type: ignore[return-value]  # two of them


# --- Activation checkpointing -----------------------------------------------------------------------------------------


class Passed:
    """One forward and backward pass."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.loss = model(inputs, targets)
        self.loss.backward()
        self.kept = sum(storages.values())
        self.results = [self.loss, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("asked", ["selective", "full"])
@pytest.mark.parametrize("config", [GPT, RESNET], ids=["gpt", "resnet50"])
def test_checkpoints_of_activations_save_memory_and_change_no_bit(config: dict[str, Any], asked: Any) -> None:
    """Dropout draws the same again, and batch norm's running averages move once."""
    set_deterministic(None, CPU)
    parsed = parse(config)
    torch.manual_seed(0)
    plain, changed = (models.build_model(parsed) for _ in range(2))
    changed.load_state_dict(plain.state_dict())
    choice = activation_checkpointing.checkpoint_blocks(changed, asked)
    assert choice
    assert choice[:2] == ("activations", asked)
    assert choice.why.startswith(f"{len(models.blocks(plain))} blocks save")
    one, other = Passed(plain, *batch(parsed)), Passed(changed, *batch(parsed))
    assert all(torch.equal(a, b) for a, b in zip(one.results, other.results, strict=True))
    assert other.kept < 0.5 * one.kept
    assert plain.state_dict().keys() == changed.state_dict().keys()


def test_selective_computes_no_matrix_product_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def flops(asked: Any) -> int:
        parsed = parse({"model": {**GPT["model"], "dropout": 0.0}})
        model = models.build_model(parsed)
        activation_checkpointing.checkpoint_blocks(model, asked)
        with FlopCounterMode(display=False) as counter:
            model(*batch(parsed)).backward()
        return int(counter.get_total_flops())

    assert flops("selective") == flops("none") < flops("full")


def test_a_model_without_blocks_has_nothing_to_checkpoint() -> None:
    with pytest.raises(UsageError, match="needs repeated blocks, and this model has none; remove the setting"):
        activation_checkpointing.checkpoint_blocks(nn.Linear(2, 2), "full")


# --- The same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "exact", "said"),
    [
        (None, CPU, True, None),
        (None, GPU, False, "false"),
        (True, GPU, True, "true"),
        (False, CPU, False, "false"),
        (False, GPU, False, "false"),
    ],
)
def test_the_same_bits_are_the_rule_where_they_cost_nothing(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, device: torch.device, exact: bool, said: str | None
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", exact)
    choices = set_deterministic(asked, device)
    assert torch.are_deterministic_algorithms_enabled() == exact
    assert torch.backends.cudnn.benchmark == (not exact)
    assert [choice.chosen for choice in choices] == ([said] if said else [])


# --- Channels last ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "half_precision", "chosen", "why"),
    [
        ("auto", GPU, True, "true", "convolutions in 16 bits"),
        ("auto", GPU, False, "false", "worthwhile on a GPU in 16 bits only"),
        ("auto", CPU, True, "false", "worthwhile on a GPU in 16 bits only"),
        (True, CPU, False, "true", "set in the spec"),
        (False, GPU, True, "false", "set in the spec"),
    ],
)
def test_pixels_lie_together_where_it_pays(
    asked: Any, device: Any, half_precision: bool, chosen: str, why: str
) -> None:
    parsed = parse({**RESNET, "channels_last": asked})
    model = models.build_model(parsed)
    before = list(model.parameters())
    assert memory_format.use_channels_last(model, parsed, device, half_precision=half_precision) == (
        "channels last",
        chosen,
        why,
    )
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    seen: list[Tensor] = []
    kernel: Any = model.get_submodule("stem")[0]  # type: ignore[index]  # a Sequential
    kernel.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    model(*batch(parsed))
    lies = [t.is_contiguous(memory_format=torch.channels_last) for t in (seen[0], kernel.weight)]
    assert lies == [chosen == "true"] * 2


def test_a_model_of_text_has_no_pixels() -> None:
    parsed = parse(GPT)
    assert memory_format.use_channels_last(models.build_model(parsed), parsed, GPU, half_precision=True) is None


@pytest.mark.slow
def test_a_run_with_pixels_together_is_the_same_run_when_it_goes_on(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **RESNET,
        "channels_last": True,
        "steps": 4,
        "eval": {"every": 0},
        "micro_batch_size": "auto",
    }
    config["optimizer"] = {"lr": 1e-3, "warmup_steps": 1}
    train(tmp_path / "whole", **config)
    preempted(tmp_path / "parts", 1, **config)
    train(tmp_path / "parts", 1, **config)
    assert differences(tmp_path / "whole", tmp_path / "parts") == set()


# --- DDP --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**10))
def test_gradients_are_sent_in_several_buckets(size: int) -> None:
    mib = prepare_model.bucket_mib(size)
    bucket = prepare_model.BUCKET_BYTES if mib is None else mib * prepare_model.MIB
    assert size <= prepare_model.BUCKET_BYTES or -(-size // bucket) >= prepare_model.MIN_BUCKETS
    assert mib is None or 6 <= mib < 25


@pytest.mark.parametrize(
    ("asked", "passes", "chosen", "why"),
    [
        (None, {}, "static graph", "the same operations run every step"),
        (None, {"whole": True}, "dynamic graph", "DDP is compiled with the model"),
        (None, {"accumulates": True}, "dynamic graph", "gradients accumulate over micro-batches"),
        (None, {"unused": True}, "dynamic graph", "some parameters get no gradient"),
        (True, {}, "static graph", "set in the spec"),
        (False, {"accumulates": True}, "dynamic graph", "set in the spec"),
    ],
)
def test_ddp_relies_on_passes_that_are_alike(
    asked: bool | None, passes: dict[str, bool], chosen: str, why: str
) -> None:
    found = prepare_model.static_graph_choice(
        asked, **{"whole": False, "accumulates": False, "unused": False, **passes}
    )
    assert found == ("ddp", chosen, why)


def test_a_static_graph_where_passes_differ_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"ddp.static_graph: true is not available: gradients accumulate over micro-batches"
    ):
        prepare_model.static_graph_choice(True, whole=False, accumulates=True, unused=False)


@pytest.mark.slow(turn=0)
def test_on_two_ranks_ddp_is_as_the_spec_says(switches: Path) -> None:
    for name, said in (
        ("plain", {"ddp": "dynamic graph"}),
        ("own-ddp", {"ddp": "dynamic graph", "buckets": "7 MiB", "gradients": "copied to buckets"}),
    ):
        chosen = {one["what"]: one["chosen"] for one in read(switches / name)[0]["choices"]}
        assert chosen.items() >= said.items()
    assert losses(switches / "own-ddp")[:2] == losses(switches / "plain")[:2]


def test_cuda_graphs_need_a_gpu() -> None:
    config = parse({**GPT, "cuda_graphs": True})
    with pytest.raises(UsageError, match="cuda_graphs: true needs an NVIDIA GPU; this process runs on cpu"):
        prepare_model.apply_memory_settings(models.build_model(config), config, Ranks(), POLICIES["fp32"])


def test_what_ddp_says_of_missing_gradients_is_said_in_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    text = "Expected to have finished reduction…\nParameter indices which did not receive grad for rank 1: 0 2\n In"
    said = prepare_model.explain_missing_gradient(RuntimeError(text), model)
    assert str(said).startswith("no gradient in this step, but one in the first, for 0.bias, 1.bias")
    assert prepare_model.explain_missing_gradient(RuntimeError("something else"), model) is None


@pytest.mark.slow(turn=0)
def test_parameters_that_never_get_a_gradient_are_told_to_ddp(switches: Path) -> None:
    chosen = {one["what"]: (one["chosen"], one["why"]) for one in read(switches / "never")[0]["choices"]}
    assert chosen["unused"] == ("searched for", "no gradient for model.spare.bias, model.spare.weight")
    assert len(steps(read(switches / "never"))) == 6


@pytest.mark.slow(turn=0)
@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_that_get_no_gradient_any_more_are_named(switches: Path, rank: int) -> None:
    said = (switches / f"no-longer-{rank}").read_text()
    assert "one in the first, for model.spare.weight, model.spare.bias" in said


@pytest.mark.slow(turn=0)
def test_on_two_ranks_every_switch_gives_the_same_losses(switches: Path) -> None:
    plain, selective = (losses(switches / name)[:2] for name in ("plain", "selective"))
    assert plain == selective
    assert [len(found) for found in plain] == [4, 1]

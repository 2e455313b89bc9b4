"""The formulas against the real models: parameters and FLOPs exactly, activations and peaks within 10 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launch_train import models
from launch_train.common.config import PRESETS, parse
from launcher.plan.memory.need import Setup, tensors
from launcher.plan.memory.sizes import sizes_of
from tests.plan.memory import trackers

GPT = {"name": "gpt", "n_layer": 2, "n_head": 4, "n_embd": 96, "block_size": 56, "vocab_size": 300}
BERT = {**GPT, "name": "bert", "dropout": 0.0}
LLAMA = {"name": "hf:llama", "hidden_size": 96, "intermediate_size": 264, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 56,
}
HF_GPT2 = {"name": "hf:gpt2", "n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 56} | {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
RESNET = {"name": "resnet50", "image_size": 64, "width": 16, "num_classes": 10}
HF = {
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_word_embeddings": True, "head_dim": 32},
    "mistral": {**LLAMA, "name": "hf:mistral"},
    "qwen2": {**LLAMA, "name": "hf:qwen2"},
    "qwen3": {**LLAMA, "name": "hf:qwen3", "head_dim": 32},
    "gpt2": HF_GPT2,
}
SMALL = {"gpt": GPT, "gpt with biases": {**GPT, "bias": True}, "bert": BERT, "resnet": RESNET, **HF}
DEFAULTS = {name: {"name": f"hf:{name}"} for name in ("llama", "mistral", "qwen2", "qwen3", "gpt2")}


def config(model: dict[str, Any] | str, **more: Any) -> dict[str, Any]:
    """A run.config; transformers' models need the number of tokens."""
    is_hf = isinstance(model, dict) and model["name"].startswith("hf:")
    return {"model": model, **({"data": {"path": "python-stdlib", "block_size": 56}} if is_hf else {}), **more}


def sizes(settings: dict[str, Any]) -> Any:
    found = sizes_of(parse(settings))
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", [*PRESETS, *SMALL.values(), *DEFAULTS.values()], ids=str)
def test_parameters_are_the_models(model: Any) -> None:
    settings = config(model)
    found = sizes(settings)
    assert found.parameters == trackers.parameters(settings)
    blocks = found.parameters - found.root
    assert blocks % found.block == 0 or "resnet50" in str(model)


@pytest.mark.parametrize("model", ["gpt2-124m", "bert-base", "resnet50", GPT, RESNET], ids=str)
def test_flops_are_those_of_the_trainers_mfu(model: Any) -> None:
    settings = parse(config(model))
    with torch.device("meta"):
        real = models.build_model(settings)
    assert sizes(config(model)).flops == pytest.approx(models.flops_per_sample(settings, None, real), rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", SMALL.values(), ids=SMALL)
def test_activations_are_what_autograd_keeps(model: dict[str, Any], half: bool) -> None:
    settings, samples = config(model), 5
    found = sizes(settings)
    saved = found.saved(half=half)
    expected = (saved.blocks + saved.outside + 4 * found.logits) * samples + (2 * found.matrices if half else 0)
    assert expected == pytest.approx(trackers.kept(settings, samples, half=half), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "samples", "passes", "checkpointing"),
    [
        (GPT, 4, 1, "none"),
        (GPT, 1, 2, "none"),
        ({**GPT, "n_layer": 3}, 3, 1, "full"),
        ({**GPT, "n_layer": 3}, 3, 1, "selective"),
        ({**GPT, "n_embd": 512, "block_size": 32}, 1, 1, "none"),  # the gradients outweigh the activations
        (BERT, 4, 1, "none"),
        (LLAMA, 2, 1, "none"),
        (RESNET, 32, 1, "none"),
    ],
    ids=str,
)
def test_peaks_are_those_of_torchs_tracker(model: Any, samples: int, passes: int, checkpointing: Any) -> None:
    settings = config(model, batch_size=samples * passes, activation_checkpointing=checkpointing)
    setup = Setup(
        memory_gb=80,
        world=1,
        share=samples * passes,
        half=False,
        compiles=False,
        checkpointing=checkpointing,
        numbers=0,
    )
    expected = sum(part.size for part in tensors(sizes(settings), setup, samples))
    assert expected == pytest.approx(trackers.peak(settings, samples, passes=passes), rel=0.1)


@pytest.mark.parametrize(
    "model",
    [
        "my_pkg.model:build",
        {"name": "hf:gpt2", "pretrained": True},
        {"name": "hf:org/name"},
        {"name": "hf:mamba"},
        {"name": "hf:llama", "mlp_bias": True},
        {"name": "hf:llama", "hidden_size": "wide"},
    ],
    ids=str,
)
def test_other_models_are_unknown(model: Any) -> None:
    assert sizes_of(parse({"model": model, "data": {"path": "python-stdlib", "block_size": 56}})) is None
    assert sizes_of(parse({"model": {"name": "hf:llama"}})) is None, "the number of tokens is unknown"

"""The sizes of the model that a `run.config` names, if its architecture is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from launch_train.common.config import Bert, Config, ExternalModel, Gpt, ResNet
from launcher.plan.memory import transformer
from launcher.plan.memory.model_sizes import ModelSizes
from launcher.plan.memory.transformer import Transformer


def sizes_of(config: Config) -> ModelSizes | None:
    """Return the sizes of a built-in model, or of a Hugging Face config of a known type; None for other models."""
    model = config.model
    scores = config.attention == "math"
    if isinstance(model, ResNet):
        from launcher.plan.memory import resnet

        return resnet.resnet_sizes(model.name, model.width, model.num_classes, model.image_size)
    if isinstance(model, Gpt | Bert):
        return transformer.sizes(replace(of_builtin(model), scores=scores))
    shape = of_family(model, config.data.block_size) if not config.loss else None
    return transformer.sizes(replace(shape, scores=scores)) if shape else None


def of_builtin(model: Gpt | Bert) -> Transformer:
    """Return the shape of the trainer's gpt or bert (train/launch_train/models)."""
    bert = isinstance(model, Bert)
    bias = True if isinstance(model, Bert) else model.bias
    return Transformer(
        name=model.name,
        layers=model.n_layer,
        width=model.n_embd,
        heads=model.n_head,
        kv_heads=model.n_head,
        head_dim=model.n_embd // model.n_head,
        mlp=4 * model.n_embd,
        vocabulary=model.vocab_size,
        tokens=model.block_size,
        positions=model.block_size,
        norm="bias" if bias else "plain",
        bias=bias,
        masked_head=bert,
        dropout=model.dropout > 0,
    )


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def of_family(model: ExternalModel, tokens: int | None) -> Transformer | None:
    """Return the shape of a config of a known type, or None: a custom model, one of the hub, another type or head, or
    a setting that may change the sizes."""
    kind = model.name.removeprefix("hf:")
    is_type = kind != model.name and kind in FAMILIES and not model.pretrained
    if not is_type or tokens is None or model.task not in ("auto", "causal-lm"):
        return None
    family, defaults = FAMILIES[kind]
    settings = {**defaults, **model.settings}
    counts = [settings[key] for key in COUNTS & defaults.keys()]
    if not model.settings.keys() <= defaults.keys() | WITHOUT_EFFECT or not all(type(each) is int for each in counts):
        return None
    return family(model.name, tokens, settings)


def llama(name: str, tokens: int, config: Mapping[str, Any]) -> Transformer:
    """Return the shape of Llama and its relatives: RMSNorm, rotary positions, grouped queries, a gated MLP."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    kind = name.removeprefix("hf:")
    kv_heads = config["num_key_value_heads"] or heads
    head_dim = config.get("head_dim") or width // heads
    return Transformer(
        name=name,
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tokens=tokens,
        norm="rms",
        bias=False,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        gated=True,
        split=True,
        tied=bool(config["tie_word_embeddings"]),
    )


def gpt2(name: str, tokens: int, config: Mapping[str, Any]) -> Transformer:
    """Return the shape of GPT-2 as transformers writes it: its GELU keeps four arrays."""
    heads, width = config["n_head"], config["n_embd"]
    return Transformer(
        name=name,
        layers=config["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp=config["n_inner"] or 4 * width,
        vocabulary=config["vocab_size"],
        tokens=tokens,
        positions=config["n_positions"],
        gelu=4,
        dropout=any(config[name] for name in ("resid_pdrop", "embd_pdrop")),
    )


_LLAMA: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 32000,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN2 = {**_LLAMA, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936}
_QWEN2.pop("head_dim")
_QWEN3 = {**_QWEN2, "head_dim": 128}
_GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257, "n_positions": 1024}

FAMILIES: Final[dict[str, tuple[Callable[[str, int, Mapping[str, Any]], Transformer], dict[str, Any]]]] = {
    "llama": (llama, _LLAMA),
    "mistral": (llama, _MISTRAL),
    "qwen2": (llama, _QWEN2),
    "qwen3": (llama, _QWEN3),
    "gpt2": (gpt2, {**_GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
}
"""transformers' model types, with its defaults (5.23, configuration_*.py). A setting that is neither here nor in
WITHOUT_EFFECT makes the model unknown."""

COUNTS: Final = frozenset(
    {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    | {"n_embd", "n_layer", "n_head", "n_positions"}
)
"""Settings that must be whole numbers."""

WITHOUT_EFFECT: Final = frozenset(
    {"max_position_embeddings", "rms_norm_eps", "layer_norm_epsilon", "initializer_range", "use_cache"}
    | {"rope_theta", "rope_parameters", "attention_dropout", "attn_pdrop", "hidden_act", "activation_function"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
"""Settings without effect on the sizes. Another activation function keeps as much or less."""

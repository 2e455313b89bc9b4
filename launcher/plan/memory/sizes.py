"""Compute the sizes of the model that a `run.config` names: a training's memory and speed depend on them.

Built-in models, and configs of Hugging Face's transformers of a known type; other models have no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from launch_train.common.config import Bert, Config, ExternalModel, Gpt, ResNet


class Saved(Struct, frozen=True):
    """Bytes that a forward pass of one sample keeps for the backward pass, with eager code.

    `blocks`: all repeated blocks; `entries`: their inputs alone, kept with activation_checkpointing: full; `operators`:
    inputs, matrix products and attention, kept with selective; `block`: the largest block; `outside`: the rest, without
    the logits; `work`: what the backward pass of a block needs besides. `repeats`: number of blocks.
    """

    repeats: int
    blocks: int
    entries: int
    operators: int
    block: int
    outside: int
    work: int


class ModelSizes(Struct, frozen=True):
    """Numbers of parameters, and what one sample is.

    `parameters` are all; `matrices` those that autocast copies to half precision; `block` those of the largest
    repeated block, `root` those outside of blocks; `head` those of the output layer. `units`: tokens of a sample, or
    1 image. `logits`: numbers that a sample's output has. `flops`: forward and backward for one sample.
    """

    name: str
    parameters: int
    matrices: int
    block: int
    root: int
    head: int
    units: int
    unit: str
    logits: int
    flops: float
    full: Saved
    """In fp32 (or TF32)."""
    half: Saved
    """Under autocast to bf16 or fp16."""

    def saved(self, *, half: bool) -> Saved:
        """Return the activations at a precision."""
        return self.half if half else self.full


def sizes_of(config: Config) -> ModelSizes | None:
    """Return the sizes of a built-in model, or of a Hugging Face config of a known type; None for other models."""
    model = config.model
    scores = config.attention == "math"
    if isinstance(model, ResNet):
        return resnet_sizes(model.name, model.width, model.num_classes, model.image_size)
    if isinstance(model, Gpt | Bert):
        return transformer_sizes(replace(of_builtin(model), scores=scores))
    shape = of_family(model, config.data.block_size) if not config.loss else None
    return transformer_sizes(replace(shape, scores=scores)) if shape else None


# --- Transformers -----------------------------------------------------------------------------------------------------


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


FP32 = 4
"""Bytes. The residual stream and the inputs of norms stay in fp32 under autocast."""


class Transformer(Struct, frozen=True):
    """A transformer's shape. `norm`: layer norm with weight and bias, without bias, or RMSNorm as transformers writes
    it (which also keeps its normalised input). `split`: query, key and value are three layers, and each one, as the two
    input layers of a `gated` MLP, keeps an own half-precision copy of its input. `gelu`: arrays of the MLP's width that
    its activation keeps. `scores`: attention keeps its matrix (attention: math)."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tokens: int
    positions: int = 0
    norm: Literal["bias", "plain", "rms"] = "bias"
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    split: bool = False
    gelu: int = 1
    tied: bool = True
    masked_head: bool = False
    """BERT's: a dense layer, a norm, and a bias for each word; also token types and a norm of the embeddings."""
    dropout: bool = False
    scores: bool = False

    @property
    def queries(self) -> int:
        """Return the width of all queries, which is also that of attention's output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Return the width of all keys, which is also that of all values."""
        return self.kv_heads * self.head_dim


def transformer_sizes(shape: Transformer) -> ModelSizes:
    width, layers, words = shape.width, shape.layers, shape.vocabulary * shape.width
    qkv = shape.queries + 2 * shape.keys
    # The parameters of a block's linear layers, without biases.
    matrices = width * (2 * shape.queries + 2 * shape.keys) + width * shape.mlp * (3 if shape.gated else 2)
    norm, biases = width * (2 if shape.norm == "bias" else 1), 0
    if shape.bias:
        biases = qkv + width + shape.mlp + width
    elif shape.qkv_bias:
        biases = qkv
    vectors = biases + 2 * norm + (2 * shape.head_dim if shape.qk_norm else 0)
    looked_up = shape.positions * width + (2 * width if shape.masked_head else 0)
    head = width * width + width + norm + shape.vocabulary if shape.masked_head else 0
    outside = words * (1 if shape.tied else 2) + looked_up + head + norm  # the last norm, or that of the embeddings
    parameters = layers * (matrices + vectors) + outside
    computed = parameters - looked_up - (0 if shape.tied else words)
    return ModelSizes(
        name=shape.name,
        parameters=parameters,
        matrices=layers * matrices + words + (width * width if shape.masked_head else 0),
        block=matrices + vectors,
        root=outside,
        head=words,
        units=shape.tokens,
        unit="tokens",
        logits=shape.tokens * shape.vocabulary,
        flops=float((6 * computed + 12 * layers * shape.queries * shape.tokens) * shape.tokens),
        full=transformer_saved(shape, 4),
        half=transformer_saved(shape, 2),
    )


def transformer_saved(shape: Transformer, item: int) -> Saved:
    """Return the activations of a sample; `item`: bytes of a matrix product's number (2 under autocast)."""
    width, tokens = shape.width, shape.tokens
    block = block_bytes(shape, item)
    products = item * (shape.queries + 2 * shape.keys + width + width + shape.mlp * (2 if shape.gated else 1))
    attention = item * shape.queries + 4 * shape.heads
    norms, inputs = (2, 3) if shape.masked_head else (1, 1)
    return Saved(
        repeats=shape.layers,
        blocks=shape.layers * block * tokens,
        entries=shape.layers * FP32 * width * tokens,
        operators=shape.layers * (FP32 * width + products + attention) * tokens,
        block=block * tokens,
        outside=(norms * norm_bytes(shape) + (inputs * item + shape.dropout) * width) * tokens,
        work=(item * shape.mlp + FP32 * width) * tokens,
    )


def block_bytes(shape: Transformer, item: int) -> int:
    """Return the bytes that one block keeps for each token.

    Norms keep their input in fp32; linear layers their input; attention query, key, value, its output and a number
    per head (flash and memory-efficient kernels); the MLP what its activation keeps, and its result.
    """
    width, queries, keys = shape.width, shape.queries, shape.keys
    copies = item == 2 and shape.split
    inputs = (3 if copies else 1) + (2 if copies and shape.gated else 1)
    kept = 2 * norm_bytes(shape) + inputs * item * width
    kept += item * (queries + 2 * keys + queries) + 4 * shape.heads
    kept += item * shape.mlp * (4 if shape.gated else 1 + shape.gelu)
    if shape.qk_norm:
        kept += (FP32 + item) * (queries + keys) + FP32 * (shape.heads + shape.kv_heads)
    if shape.dropout:
        kept += 2 * width  # a byte of mask for each number, after attention and after the MLP
    if shape.scores:
        kept += 2 * FP32 * shape.heads * shape.tokens
    return kept


def norm_bytes(shape: Transformer) -> int:
    """Return the bytes that a norm keeps for each token: its input and its statistics, in fp32."""
    return FP32 * (2 * shape.width + 1) if shape.norm == "rms" else FP32 * (shape.width + 2)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


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


# --- ResNet -----------------------------------------------------------------------------------------------------------


STAGES = (3, 4, 6, 3)
EXPANSION = 4


class Convolution(NamedTuple):
    """A convolution without bias and the batch norm behind it. `size`: height and width of the output."""

    inputs: int
    outputs: int
    kernel: int
    size: int
    activated: bool
    """A ReLU follows in place: it keeps no array of its own."""

    @property
    def weights(self) -> int:
        """Return the parameters of the kernel."""
        return self.inputs * self.outputs * self.kernel**2

    @property
    def numbers(self) -> int:
        """Return the numbers of the output of one image."""
        return self.outputs * self.size**2


def resnet_sizes(name: str, width: int, classes: int, image_size: int) -> ModelSizes:
    """Return the sizes of ResNet-50 (v1.5)."""
    stem, blocks = resnet_layers(width, image_size)
    every = [stem, *(layer for block in blocks for layer in block)]
    last = EXPANSION * 8 * width
    kernels = sum(layer.weights for layer in every)
    norms = 2 * sum(layer.outputs for layer in every)
    head = last * classes
    largest = max(blocks, key=lambda block: sum(layer.weights for layer in block))
    block = sum(layer.weights + 2 * layer.outputs for layer in largest)
    products = sum(layer.weights * layer.size**2 for layer in every) + head
    return ModelSizes(
        name=name,
        parameters=kernels + norms + head + classes,
        matrices=kernels + head,
        block=block,
        root=stem.weights + 2 * stem.outputs + head + classes,
        head=head,
        units=1,
        unit="images",
        logits=classes,
        flops=6.0 * products,
        full=resnet_saved(stem, blocks, image_size, 4),
        half=resnet_saved(stem, blocks, image_size, 2),
    )


def resnet_layers(width: int, image_size: int) -> tuple[Convolution, list[list[Convolution]]]:
    """Return the first convolution, and those of each bottleneck (the last one of four is the shortcut's)."""
    size = halved(image_size)
    stem = Convolution(3, width, 7, size, True)
    size, before, blocks = halved(size), width, []
    for stage, count in enumerate(STAGES):
        inner, after = width * 2**stage, EXPANSION * width * 2**stage
        for number in range(count):
            wide, size = size, halved(size) if stage and not number else size
            path = [
                Convolution(before, inner, 1, wide, True),
                Convolution(inner, inner, 3, size, True),
                Convolution(inner, after, 1, size, False),
            ]
            blocks.append(path if number else [*path, Convolution(before, after, 1, size, False)])
            before = after
    return stem, blocks


def halved(size: int) -> int:
    """Return the output size of a convolution or a pool with stride 2 and half its kernel as padding."""
    return (size + 1) // 2


def resnet_saved(stem: Convolution, blocks: list[list[Convolution]], image_size: int, item: int) -> Saved:
    """Return the activations of an image; `item`: bytes of a convolution's number.

    A convolution keeps its input and a batch norm its own, which is the convolution's output. What a ReLU keeps is the
    input of the next convolution.
    """
    each = [item * sum(layer.numbers * (2 if layer.activated else 1) for layer in block) for block in blocks]
    ends = [item * block[2].numbers for block in blocks]  # the ReLU behind the sum
    pooled = stem.outputs * halved(stem.size) ** 2
    image = 3 * image_size**2 * item
    kept = [inside + end for inside, end in zip(each, ends, strict=True)]
    return Saved(
        repeats=len(blocks),
        blocks=sum(kept),
        entries=item * pooled + sum(ends[:-1]),
        operators=item * pooled + sum(ends[:-1]) + item * sum(layer.numbers for block in blocks for layer in block),
        block=max(kept),
        outside=image + 2 * item * stem.numbers + (8 + item) * pooled + item * blocks[-1][2].outputs,
        work=2 * item * max(layer.numbers for block in blocks for layer in block),
    )

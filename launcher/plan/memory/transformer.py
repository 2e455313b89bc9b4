"""The sizes of transformers: the trainer's gpt and bert, and families of Hugging Face's with the same shape."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from launcher.plan.memory.model_sizes import ModelSizes, Saved

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


def sizes(shape: Transformer) -> ModelSizes:
    """Return the sizes of a transformer."""
    width, layers, words = shape.width, shape.layers, shape.vocabulary * shape.width
    qkv = shape.queries + 2 * shape.keys
    matrices, norm, biases = block_matrices(shape), width * (2 if shape.norm == "bias" else 1), 0
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
        block_matrices=matrices,
        root=outside,
        head=words,
        units=shape.tokens,
        unit="tokens",
        logits=shape.tokens * shape.vocabulary,
        flops=float((6 * computed + 12 * layers * shape.queries * shape.tokens) * shape.tokens),
        full=saved(shape, 4),
        half=saved(shape, 2),
    )


def block_matrices(shape: Transformer) -> int:
    """Return the parameters of a block's linear layers, without biases."""
    attention = shape.width * (2 * shape.queries + 2 * shape.keys)
    return attention + shape.width * shape.mlp * (3 if shape.gated else 2)


# --- Activations ----------------------------------------------------------------------------------------------------


def saved(shape: Transformer, item: int) -> Saved:
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

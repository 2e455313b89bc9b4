"""What memory and speed depend on: the sizes of a model, whatever its kind."""

from __future__ import annotations

from msgspec import Struct


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
    repeated block, `block_matrices` its matrices, `root` those outside of blocks; `head` those of the output layer;
    `unused` those of the position and type embeddings, which cost no FLOPs. `units`: tokens of a sample, or 1 image.
    `logits`: numbers that a sample's output has. `flops`: forward and backward for one sample.
    """

    name: str
    parameters: int
    matrices: int
    block: int
    block_matrices: int
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

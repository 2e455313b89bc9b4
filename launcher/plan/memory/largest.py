"""The largest model for an amount of GPU memory, by what is done with it. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from launch_train.common.config import PRESETS, parse
from launcher.errors import UsageError
from launcher.plan.memory.config_sizes import sizes_of
from launcher.plan.memory.need import CONTEXT, FRAGMENTATION, GB, GIB

UNITS = {"": GB, "gb": GB, "g": GB, "gib": GIB, "gi": GIB, "mb": 10**6, "mib": 2**20, "tb": 10**12}
ACTIVATIONS = 0.1
"""Share left for activations, or for the keys and values of earlier tokens. Assumed: one short sample."""
USES = {
    "inference, bf16": (2.0, "weights"),
    "inference, fp32": (4.0, "weights"),
    "LoRA, bf16": (2.16, "weights, and adapters of 1 % of them at 16 bytes each"),
    "AdamW, fp32": (16.0, "weights, gradients and two moments"),
    "AdamW, bf16 autocast": (18.0, "weights, gradients, two moments and bf16 weights"),
}
"""Bytes for each parameter."""


class Largest(NamedTuple):
    """The most parameters for a use, and the largest built-in model within them (empty: none)."""

    use: str
    bytes_per_parameter: float
    what: str
    parameters: int
    model: str


def memory_bytes(text: str) -> int:
    """Return the bytes of `24GB`, `24` or `80 GiB`. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not float(match[1]):
        raise UsageError(f"--vram: invalid amount of memory {text!r}", "Use for example --vram 24GB.")
    return int(float(match[1]) * unit)


def largest_models(memory: int) -> list[Largest]:
    """Return the largest model for each use, with one GPU of that many bytes."""
    usable = max(0.0, (memory - CONTEXT) / (1 + FRAGMENTATION) * (1 - ACTIVATIONS))
    known = sorted((sizes.parameters, name) for name in PRESETS if (sizes := sizes_of(parse({"model": name}))))
    rows = []
    for use, (each, what) in USES.items():
        most = int(usable / each)
        name = max(((size, name) for size, name in known if size <= most), default=(0, ""))[1]
        rows.append(Largest(use, each, what, most, name))
    return rows

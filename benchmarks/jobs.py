"""What the loops of `benchmarks.training` train, in the plain loop's words and in the trainer's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import Loop

STEPS = 1_000_000
"""No loop comes to its end while it is measured."""

Told = Mapping[str, Any]

NANOGPT = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
"""The small GPT of nanoGPT's README, for a CPU."""

HARDLY = {"n_layer": 4, "n_head": 2, "n_embd": 8, "block_size": 8}
"""As many operators and parameters, and hardly any work: what is left of a step is what its loop costs."""

JOB: Told = {
    "steps": STEPS,
    "batch_size": 12,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "seed": 1337,
    "shape": NANOGPT,
}


def config(told: Told, **more: Any) -> dict[str, Any]:
    """A job in the trainer's words."""
    optimizer = {key: told[key] for key in ("lr", "min_lr", "warmup_steps", "weight_decay", "grad_clip")}
    own = {"model": {"name": "gpt", **told["shape"]}, "data": told["text"], "optimizer": optimizer}
    rest = {key: told[key] for key in ("steps", "batch_size", "seed")}
    return {**own, **rest, "eval": {"every": 0}, **more}


@contextmanager
def text() -> Iterator[Path]:
    """Two megabytes of Python's standard library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        path.write_bytes(b"".join(file.read_bytes() for file in files)[: 2 << 20])
        yield path


def plain(told: Told, ranks: int = 1, title: str = "plain loop") -> list[Loop]:
    """The loop that the others are measured against, and the same once more: what these two differ by is noise."""
    return [Loop(title, "plain", told, ranks), Loop(f"{title}, again", "plain", told, ranks)]


def trainer(title: str, run_config: Told, ranks: int = 1, *, writes: bool = True) -> Loop:
    """The built-in trainer. `writes`: it has a run folder."""
    return Loop(title, "trainer", {"writes": writes, "config": run_config}, ranks)


def peers(told: Told, ranks: int) -> list[Loop]:
    """Loops written with other packages, as their documentation has them."""
    return [Loop("HF accelerate", "accelerate", told, ranks), Loop("Lightning Fabric", "fabric", told, ranks)]

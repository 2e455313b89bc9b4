"""Define the training jobs of `benchmarks.training`, for the plain loop and for the trainer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import Loop

STEPS = 1_000_000
"""Steps of a job; no loop finishes while it is measured."""

JobFields = Mapping[str, Any]

NANOGPT = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
"""The small CPU GPT of nanoGPT's README."""

HARDLY = {"n_layer": 4, "n_head": 2, "n_embd": 8, "block_size": 8}
"""Model with as many operators and parameter tensors, but hardly any work: a step takes only the loop's overhead."""

JOB: JobFields = {
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


def config(fields: JobFields, **more: Any) -> dict[str, Any]:
    """Return the trainer's run.config for a job."""
    optimizer = {key: fields[key] for key in ("lr", "min_lr", "warmup_steps", "weight_decay", "grad_clip")}
    own = {"model": {"name": "gpt", **fields["shape"]}, "data": fields["text"], "optimizer": optimizer}
    rest = {key: fields[key] for key in ("steps", "batch_size", "seed")}
    return {**own, **rest, "eval": {"every": 0}, **more}


@contextmanager
def text() -> Iterator[Path]:
    """Yield a file with two megabytes of text from Python's standard library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        path.write_bytes(b"".join(file.read_bytes() for file in files)[: 2 << 20])
        yield path


def plain(fields: JobFields, ranks: int = 1, title: str = "plain loop") -> list[Loop]:
    """Return the baseline loop twice; the difference between the two is noise."""
    return [Loop(title, "plain", fields, ranks), Loop(f"{title}, again", "plain", fields, ranks)]


def trainer(title: str, run_config: JobFields, ranks: int = 1, *, writes: bool = True) -> Loop:
    """Return the built-in trainer. `writes`: it has a run folder."""
    return Loop(title, "trainer", {"writes": writes, "config": run_config}, ranks)


def peers(fields: JobFields, ranks: int) -> list[Loop]:
    """Return loops that use other packages, written as in their documentation."""
    return [Loop("HF accelerate", "accelerate", fields, ranks), Loop("Lightning Fabric", "fabric", fields, ranks)]

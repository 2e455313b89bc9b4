"""Small training runs in this process, through the trainer's own loop, and comparisons of their losses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_acceptance.tasks import Measured, Place, Verdict

GPT = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "vocab_size": 512}
TINY_GPT = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 64}


def config(place: Place, **more: Any) -> dict[str, Any]:
    """Return the config of a run of some seconds; `more` replaces parts of it."""
    size, steps, rate = (8, 16, 1e-2) if place.tiny else (16, 30, 1e-3)
    return {
        "model": TINY_GPT if place.tiny else GPT,
        "data": "synthetic",
        "steps": steps,
        "batch_size": size,
        "micro_batch_size": size,
        "compile": False,
        "eval": {"every": 0},
        "monitor": 0,
        "optimizer": {"lr": rate, "warmup_steps": 4},
        "checkpoint": "off",
        **more,
    }


def trained(place: Place, name: str, **more: Any) -> dict[str, Any]:
    """Train in this process. Return losses and seconds of each step, peak memory, and the trainer's choices."""
    from launch_train.common import contract
    from launch_train.common.config import parse
    from launch_train.distributed.process_group import Ranks
    from launch_train.trainer import train

    folder = place.folder / name
    before = _peaked(place)
    train.train(parse(config(place, **more)), Ranks(device=place.device), {contract.RUN_FOLDER: str(folder)})
    found = read(folder)
    return {**found, "peak_gb": _peak_gb(place) - before if place.gpus else None}


def read(folder: Path) -> dict[str, Any]:
    """Return the metrics of all starts of a run; of a repeated step the last one counts."""
    from launch_train.common.storage import LocalFolder

    storage = LocalFolder(folder)
    rows = [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]
    steps = {row["step"]: row for row in rows if "event" not in row}
    events = [row for row in rows if "event" in row]
    start = next(row for row in events if row["event"] == "start")
    end: dict[str, Any] = next((row for row in reversed(events) if row["event"] == "end"), {})
    return {
        "steps": list(steps),
        "losses": [row["loss"] for row in steps.values()],
        "step_s": [row["step_s"] for row in steps.values()],
        "skipped": [number for number, row in steps.items() if "skipped" in row],
        "micro": [row.get("micro_batch", 0) for row in steps.values()],
        "memory_gb": max((row["memory_gb"] for row in steps.values()), default=0.0),
        "mfu": [row.get("mfu") for row in steps.values()],
        "events": [row["event"] for row in events],
        "resumed": [row["step"] for row in events if row["event"] == "resumed"],
        "out_of_memory": [row["step"] for row in events if row["event"] == "out_of_memory"],
        "precision": start["precision"],
        "backend": start["backend"],
        "world_size": start["world_size"],
        "parameters": start["parameters"],
        "parameters_sha256": end.get("parameters_sha256", ""),
        "choices": {one["what"]: one["chosen"] for one in start["choices"]},
        "reasons": {one["what"]: one["why"] for one in start["choices"]},
    }


def _peaked(place: Place) -> float:
    """Free the memory of earlier runs; return the GB that are still held."""
    import torch

    from launch_train.performance import micro_batch

    if "_dynamo" in vars(torch):
        torch._dynamo.reset()
    if not place.gpus:
        return 0.0
    micro_batch.free_memory(place.device)
    torch.cuda.reset_peak_memory_stats(place.device)
    return torch.cuda.memory_allocated(place.device) / 1e9


def _peak_gb(place: Place) -> float:
    import torch

    return torch.cuda.max_memory_allocated(place.device) / 1e9


@contextmanager
def limited(place: Place, size: float) -> Iterator[None]:
    """Limit this process to `size` bytes of the GPU inside the context."""
    import torch

    from launch_train.performance import micro_batch

    micro_batch.free_memory(place.device)
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total, place.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)


@contextmanager
def replaced(module: Any, **others: Any) -> Iterator[None]:
    """Replace names of a module inside the context."""
    before = {name: getattr(module, name) for name in others}
    for name, other in others.items():
        setattr(module, name, other)
    try:
        yield
    finally:
        for name, one in before.items():
            setattr(module, name, one)


# --- Judgements -------------------------------------------------------------------------------------------------------


def apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of a step; infinity if they can't be compared."""
    if len(losses) != len(others) or not losses or not all(map(_finite, (*losses, *others))):
        return float("inf")
    return max(abs(one - other) / max(abs(other), 1e-9) for one, other in zip(losses, others, strict=True))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < float("inf")


def learns_alike(measured: Measured, most: float = 0.03) -> Verdict:
    """Check that `measured["losses"]` fall, and match `measured["reference"]` within `most`."""
    losses, reference = measured["losses"], measured["reference"]
    found = apart(losses, reference)
    if found > most:
        return Verdict(False, f"losses differ from the reference by {found:.2%}, more than {most:.2%}")
    if losses[-1] > 0.95 * losses[0]:
        return Verdict(False, f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    return Verdict(True, f"loss {losses[0]:.3f} to {losses[-1]:.3f}, within {found:.3%} of the reference")


def all_of(*found: Verdict) -> Verdict:
    """Combine verdicts: passed if all are, otherwise what is wrong."""
    wrong = [one.why for one in found if not one.ok]
    return Verdict(not wrong, "; ".join(wrong or [one.why for one in found if one.why]))


def check(ok: bool, wrong: str, right: str = "") -> Verdict:
    return Verdict(ok, right if ok else wrong)


def typical(seconds: Sequence[float], skip: int = 5) -> float:
    """Return the median without the first steps, in which kernels are loaded and chosen."""
    return median(seconds[skip:] or seconds)


def chosen(measured: Measured, what: str, expected: str) -> Verdict:
    """Check a choice that the trainer reported."""
    found: Mapping[str, str] = measured["choices"]
    why = measured.get("reasons", {}).get(what, "")
    return check(found.get(what) == expected, f"{what} is {found.get(what)}, not {expected}: {why}")

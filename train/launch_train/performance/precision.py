"""Which numbers a run computes with, and what that takes: autocast, loss scaling, TF32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from launch_train.common.config import Precision
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError


@dataclass(frozen=True)
class Numbers:
    """`autocast`: the type that autocast uses, if any. `scaled`: fp16 needs its loss scaled. `tf32`: matmuls may."""

    name: str
    autocast: torch.dtype | None = None
    scaled: bool = False
    tf32: bool = False


KINDS = {
    "bf16": Numbers("bf16", torch.bfloat16, tf32=True),
    "fp16": Numbers("fp16", torch.float16, scaled=True, tf32=True),
    "tf32": Numbers("tf32", tf32=True),
    "fp32": Numbers("fp32"),
}


def choose(asked: Precision, device: str, capability: tuple[int, int] | None = None) -> Numbers:
    """The numbers for a device; `capability` is CUDA's (7, 0) for V100, (7, 5) for T4, (8, 0) for A100.

    auto: bf16 from Ampere (8) on, fp16 on Volta and Turing (7), fp32 on older GPUs (P100, P4: 6), on the CPU and on a
    Mac's GPU (mps). Raises UsageError for what the device can't do.
    """
    if asked == "auto":
        return KINDS[_best(device, capability)]
    if asked in ("bf16", "tf32") and device == "cuda" and capability is not None and capability < (8, 0):
        raise UsageError(f"precision: this GPU has no {asked}; use fp16 or fp32, or leave it to auto")
    if asked in ("fp16", "tf32") and device == "cpu":
        raise UsageError(f"precision: {asked} needs a GPU; on the CPU use fp32 or bf16, or leave it to auto")
    if asked != "fp32" and device == "mps":
        raise UsageError(f"precision: {asked} is not for a Mac's GPU; use fp32, or leave it to auto")
    return KINDS[asked]


def _best(device: str, capability: tuple[int, int] | None) -> str:
    if device != "cuda" or capability is None or capability < (7, 0):
        return "fp32"
    return "bf16" if capability >= (8, 0) else "fp16"


def explained(asked: Precision, numbers: Numbers, device: str) -> Choice:
    """What `choose` has chosen for a kind of device, and why."""
    if asked != "auto":
        return Choice("precision", numbers.name, "the spec says so")
    return Choice("precision", numbers.name, _WHY[numbers.name] if device == "cuda" else _ELSEWHERE[device])


_WHY = {
    "bf16": "a GPU from Ampere on",
    "fp16": "a GPU before Ampere, with tensor cores",
    "fp32": "a GPU without tensor cores",
}
_ELSEWHERE = {"cpu": "less is no faster on a CPU", "mps": "a Mac's GPU"}


def setup(asked: Precision, device: torch.device) -> Numbers:
    """Choose for this device, and switch TF32 on or off for the process."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    numbers = choose(asked, device.type, capability)
    torch.set_float32_matmul_precision("high" if numbers.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = numbers.tf32
    return numbers


def autocast(numbers: Numbers, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    return torch.autocast(device.type, numbers.autocast) if numbers.autocast else nullcontext()


def scaler(numbers: Numbers, device: torch.device) -> torch.amp.GradScaler:
    """A gradient scaler; one that does nothing unless fp16 needs it, so that the loop is the same."""
    return torch.amp.GradScaler(device.type, enabled=numbers.scaled)

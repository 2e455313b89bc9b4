"""Number formats of a run: autocast, loss scaling, TF32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from launch_train.common.config import Precision
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError


@dataclass(frozen=True)
class PrecisionPolicy:
    """`autocast`: the type that autocast uses, if any. `scales_loss`: needed for fp16. `tf32`: matmuls may use it."""

    name: str
    autocast: torch.dtype | None = None
    scales_loss: bool = False
    tf32: bool = False


POLICIES = {
    "bf16": PrecisionPolicy("bf16", torch.bfloat16, tf32=True),
    "fp16": PrecisionPolicy("fp16", torch.float16, scales_loss=True, tf32=True),
    "tf32": PrecisionPolicy("tf32", tf32=True),
    "fp32": PrecisionPolicy("fp32"),
}


def choose(configured: Precision, device: str, capability: tuple[int, int] | None = None) -> PrecisionPolicy:
    """Return the policy for a device. `capability` is CUDA's: (7, 0) for V100, (7, 5) for T4, (8, 0) for A100.

    auto: bf16 on Ampere (8) and newer, fp16 on Volta and Turing (7), fp32 on older GPUs (P100, P4: 6), on CPUs and on
    Apple GPUs (mps). Raises UsageError if the device doesn't support the format.
    """
    if configured == "auto":
        if device != "cuda" or capability is None or capability < (7, 0):
            return POLICIES["fp32"]
        return POLICIES["bf16" if capability >= (8, 0) else "fp16"]
    if configured in ("bf16", "tf32") and device == "cuda" and capability is not None and capability < (8, 0):
        raise UsageError(f"precision: this GPU doesn't support {configured}; use fp16, fp32 or auto")
    if configured in ("fp16", "tf32") and device == "cpu":
        raise UsageError(f"precision: {configured} needs a GPU; on a CPU use fp32, bf16 or auto")
    if configured != "fp32" and device == "mps":
        raise UsageError(f"precision: {configured} is not supported on Apple GPUs; use fp32 or auto")
    return POLICIES[configured]


def choice(configured: Precision, policy: PrecisionPolicy, device: str) -> Choice:
    if configured != "auto":
        return Choice("precision", policy.name, "set in the spec")
    return Choice("precision", policy.name, _WHY[policy.name] if device == "cuda" else _WHY_WITHOUT_CUDA[device])


_WHY = {
    "bf16": "Ampere or newer GPU",
    "fp16": "GPU older than Ampere, with tensor cores",
    "fp32": "GPU without tensor cores",
}
_WHY_WITHOUT_CUDA = {"cpu": "lower precision is not faster on CPU", "mps": "Apple GPU"}


def setup(configured: Precision, device: torch.device) -> PrecisionPolicy:
    """Choose the policy for this device, and turn TF32 on or off for the process."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    policy = choose(configured, device.type, capability)
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = policy.tf32
    return policy


def autocast(policy: PrecisionPolicy, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, policy.autocast) if policy.autocast else nullcontext()


def scaler(policy: PrecisionPolicy, device: torch.device) -> torch.amp.GradScaler:
    """Return a gradient scaler, disabled unless the policy scales the loss."""
    return torch.amp.GradScaler(device.type, enabled=policy.scales_loss)

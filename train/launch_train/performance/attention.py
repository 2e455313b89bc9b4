"""Choose the attention kernel: torch's choice for each scaled_dot_product_attention, or the one set in the spec."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.compiler.config
from torch.nn.attention import SDPBackend, sdpa_kernel

from launch_train.common.config import Attention, Config
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError

KERNELS: Final[dict[str, SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

AVAILABLE: Final = {"cuda": tuple(KERNELS), "cpu": ("flash", "math")}
"""The kernels of each device type (torch 2.13). On an Apple GPU the choice has no effect."""

_NO_KERNEL = re.compile(r"No available kernel|No viable backend for scaled_dot_product_attention")


@contextmanager
def use_kernel(kernel: Attention, device: str) -> Iterator[None]:
    """Inside, compute attention with `kernel`, in any model.

    Raises UsageError if the device type has no such kernel, or if it doesn't support the model's attention (its number
    format, masks or dropout).
    """
    if kernel == "auto":
        yield
        return
    if kernel not in AVAILABLE.get(device, ()):
        available = " or ".join(("auto", *AVAILABLE.get(device, ())))
        raise UsageError(f"attention: {kernel} is not available on {device}; use {available}")
    try:
        with _collect_reasons() as reasons, _separate_compile_cache(kernel), sdpa_kernel(KERNELS[kernel]):
            yield
    except RuntimeError as error:
        if not _NO_KERNEL.search(str(error)):
            raise
        why = f": {reasons[0]}" if reasons else ""
        raise UsageError(f"attention: {kernel} doesn't support this model's attention{why}; use auto") from error


@contextmanager
def _collect_reasons() -> Iterator[list[str]]:
    """Collect why torch rejects a kernel: before it fails, it warns once per reason from sdp_utils."""
    reasons, showwarning = list[str](), warnings.showwarning

    def collect(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        text, _, origin = str(message).partition(" (Triggered")
        text = text.rstrip(". ")
        if "sdp_utils" not in origin:
            showwarning(message, *args, **kwargs)
        elif not text.endswith("because:") and "runtime disabled" not in text:  # the kernels that the spec excludes
            reasons.append(text)

    warnings.showwarning = collect
    try:
        yield reasons
    finally:
        warnings.showwarning = showwarning


@contextmanager
def _separate_compile_cache(kernel: Attention) -> Iterator[None]:
    """Add the kernel to the key of torch's compile caches, which ignore it (torch 2.13)."""
    settings: Any = torch.compiler.config
    before = settings.cache_key_tag
    settings.cache_key_tag = f"attention: {kernel}"
    try:
        yield
    finally:
        settings.cache_key_tag = before


def choose_kernel(config: Config, device: str) -> Attention:
    """Return the kernel set in the spec, or math for `deterministic: true` on a GPU.

    The backward passes of flash and efficient are deterministic only with
    `torch.use_deterministic_algorithms(True, warn_only=False)`, which raises errors for models with operators that have
    no deterministic kernel (torch 2.13 warns about it); cuDNN's is never deterministic. Raises UsageError if the spec
    sets one of these kernels together with `deterministic: true`.
    """
    kernel = config.attention
    if device != "cuda" or not config.deterministic or kernel == "math":
        return kernel
    if kernel == "auto":
        return "math"
    raise UsageError(f"attention: {kernel} is not deterministic, but deterministic is true; use auto or math")


def choices(config: Config, device: str) -> tuple[Choice, ...]:
    """Return the kernel and why it was chosen; nothing if torch chooses."""
    kernel = choose_kernel(config, device)
    why = "set in the spec" if kernel == config.attention else "the faster GPU kernels are not deterministic"
    return () if kernel == "auto" else (Choice("attention", kernel, why),)

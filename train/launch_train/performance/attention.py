"""Which kernel computes attention: torch's choice in each scaled_dot_product_attention, or the one the spec names."""

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

HERE: Final = {"cuda": tuple(KERNELS), "cpu": ("flash", "math")}
"""The kernels of each kind of device (torch 2.13); a Mac's GPU takes its own way whatever it is told."""

_LACKING = re.compile(r"No available kernel|No viable backend for scaled_dot_product_attention")


@contextmanager
def kernel(asked: Attention, device: str) -> Iterator[None]:
    """Inside, attention is computed as `asked` on this kind of device, of whosever model it is. Raises UsageError: the
    device has no such kernel, or it doesn't compute what the model asks of it (its numbers, its masks, its dropout)."""
    if asked == "auto":
        yield
        return
    if asked not in HERE.get(device, ()):
        right = " or ".join(("auto", *HERE.get(device, ())))
        raise UsageError(f"attention: there is no {asked} on {device}; use {right}")
    try:
        with _reasons() as reasons, _compiled_apart(asked), sdpa_kernel(KERNELS[asked]):
            yield
    except RuntimeError as error:
        if not _LACKING.search(str(error)):
            raise
        why = f": {reasons[0]}" if reasons else ""
        raise UsageError(f"attention: {asked} doesn't compute this model's attention{why}; use auto") from error


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Why torch doesn't take a kernel: before it fails it warns of that, a line each, from the file that chooses."""
    found, show = list[str](), warnings.showwarning

    def note(message: Warning | str, *where: Any, **more: Any) -> None:
        text, _, place = str(message).partition(" (Triggered")
        text = text.rstrip(". ")
        if "sdp_utils" not in place:
            show(message, *where, **more)
        elif not text.endswith("because:") and "runtime disabled" not in text:  # those that the spec didn't ask for
            found.append(text)

    warnings.showwarning = note
    try:
        yield found
    finally:
        warnings.showwarning = show


@contextmanager
def _compiled_apart(asked: Attention) -> Iterator[None]:
    """torch's caches of compiled code don't ask which kernels were allowed when it was compiled (torch 2.13)."""
    settings: Any = torch.compiler.config
    before = settings.cache_key_tag
    settings.cache_key_tag = f"attention: {asked}"
    try:
        yield
    finally:
        settings.cache_key_tag = before


def chosen(config: Config, device: str) -> Attention:
    """The kernel that the spec asks for, or math for `deterministic: true` on a GPU.

    The backward passes of flash and efficient add in a fixed order only with
    `torch.use_deterministic_algorithms(True, warn_only=False)`, which raises errors for models that use operators
    without such a kernel (torch 2.13 says so in a warning); cuDNN's never does. Raises UsageError: the spec asks for
    one of these.
    """
    asked = config.attention
    if device != "cuda" or not config.deterministic or asked == "math":
        return asked
    if asked == "auto":
        return "math"
    raise UsageError(f"attention: {asked} doesn't give the same bits each time (deterministic: true); use auto or math")


def explained(config: Config, device: str) -> tuple[Choice, ...]:
    """What to say of it, unless it is torch's choice."""
    kernel = chosen(config, device)
    why = "the spec says so" if kernel == config.attention else "deterministic; the faster ones on a GPU are not"
    return () if kernel == "auto" else (Choice("attention", kernel, why),)

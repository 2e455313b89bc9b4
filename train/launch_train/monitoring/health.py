"""Find faults of a node's GPUs in the output of nvidia-smi. Pure; launch_train.node.health_check runs nvidia-smi and
adds other checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final, NamedTuple

from launch_train.monitoring.nvidia_smi import Card

MIN_DRIVER: Final = {12: 525, 13: 580}
"""Oldest driver branch that runs each major version of CUDA
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""

NVLINKED: Final = re.compile(r"A100-SXM|H100 80GB HBM3|H200(?! NVL)|G?B[23]00")
"""Names of GPUs for which every pair in a cloud machine is connected by NVLink."""

FOREIGN_GB: Final = 1.0
"""Memory use in GB above which another process must be on the GPU; the driver alone uses less."""


class GpuFault(NamedTuple):
    """A fault of a GPU or a node. `is_fatal`: training can't work with it."""

    text: str
    is_fatal: bool = False


def faults(cards: Sequence[Card], links: Sequence[Sequence[str]] = ()) -> list[GpuFault]:
    """Return the faults of these GPUs, each once with the GPUs that have it."""
    numbers: dict[GpuFault, list[int]] = {}
    for card in cards:
        for fault in (*_memory_faults(card), *_use_faults(card), *_speed_faults(card)):
            numbers.setdefault(fault, []).append(card.number)
    named: list[GpuFault] = []
    for fault, indices in numbers.items():
        gpus = f"GPU{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
        named.append(GpuFault(f"{gpus}: {fault.text}", fault.is_fatal))
    return [*named, *_slow_links(cards, links)]


def _memory_faults(card: Card) -> Iterator[GpuFault]:
    """Yield memory faults. According to NVIDIA, a pending remapping needs no action; a recovery action does
    (https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html)."""
    if card.recovery in ("Reset", "Reboot"):
        yield GpuFault(f"the driver requests a {card.recovery.lower()}: use another machine", is_fatal=True)
    elif card.recovery:
        yield GpuFault(f"the driver requests this action: {card.recovery}")
    if card.remap_failed:
        yield GpuFault("broken memory could not be replaced by spare memory: use another machine", is_fatal=True)
    if card.remap_pending:
        yield GpuFault("broken memory is replaced at the next reset: it needs a reset")
    if card.uncorrectable:
        yield GpuFault(f"{card.uncorrectable} uncorrectable memory errors since the driver was loaded")


def _use_faults(card: Card) -> Iterator[GpuFault]:
    if card.compute_mode == "Prohibited":
        yield GpuFault("its compute mode is Prohibited: nothing can run on it (nvidia-smi -c DEFAULT)", is_fatal=True)
    elif card.compute_mode.startswith("Exclusive"):
        yield GpuFault(f"its compute mode is {card.compute_mode}: a second process on it would fail")
    if card.mig and not card.mig_devices:
        yield GpuFault("MIG is on, but has no instance to run on (nvidia-smi -mig 0 turns it off)", is_fatal=True)
    elif card.mig:
        yield GpuFault("MIG is on: a process gets one instance, NCCL can't join two, and utilisation isn't measured")
    for process in card.processes:
        memory = "" if process.memory_gb is None else f" with {process.memory_gb:.1f} GB"
        yield GpuFault(f"{process.name} (pid {process.pid}) is on it{memory}")
    if not card.processes and not card.mig and (card.used_gb or 0) > FOREIGN_GB:
        yield GpuFault(
            f"{card.used_gb:.1f} of {card.memory_gb or 0:.1f} GB are in use, by a process that can't be seen from here"
        )
    if card.fabric not in ("", "Completed", "Not Supported"):
        yield GpuFault(f"it is not registered with the NVSwitch fabric ({card.fabric}): CUDA may fail with error 802")


def _speed_faults(card: Card) -> Iterator[GpuFault]:
    if card.power_limit_w and card.usual_power_w and card.power_limit_w < 0.99 * card.usual_power_w:
        yield GpuFault(
            f"its power limit is {card.power_limit_w:.0f} W instead of {card.usual_power_w:.0f}: it is slower"
        )
    if card.clock_mhz and card.usual_clock_mhz and card.clock_mhz < card.usual_clock_mhz:
        yield GpuFault(
            f"its clock is set to {card.clock_mhz:.0f} MHz instead of {card.usual_clock_mhz:.0f}: it is slower"
        )
    if card.slowed:
        yield GpuFault(f"it is slowed down without work ({', '.join(card.slowed)})")


def _slow_links(cards: Sequence[Card], links: Sequence[Sequence[str]]) -> Iterator[GpuFault]:
    if not all(NVLINKED.search(card.name) for card in cards):
        return
    near = [card.number for card in cards if card.number < len(links)]
    pairs = [(a, b) for a, b in combinations(near, 2) if not links[a][b].startswith("NV")]
    if pairs:
        (a, b), more = pairs[0], f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        yield GpuFault(
            f"GPU {a} and GPU {b}{more} reach each other by {links[a][b]} instead of NVLink: slow all-reduce"
        )


def cuda_fault(driver: str, supports: str, image: str) -> GpuFault | None:
    """Return a fault if a driver that supports CUDA up to `supports` cannot run an image with CUDA `image`.

    An empty string means unknown. Within a major version, older drivers run newer CUDA. `supports` counts, not the
    driver's version: a compatibility package in the image can raise it.
    """
    if not (driver and supports and image) or _major(supports) >= _major(image):
        return None
    least = MIN_DRIVER.get(_major(image))
    needs = f"needs {least} or newer" if least else "needs a newer one"
    return GpuFault(
        f"driver {driver} supports CUDA {supports}; this image has CUDA {image}, which {needs}", is_fatal=True
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def is_gpu(requested: str, device: str) -> bool:
    """Return whether a device name ("NVIDIA H100 80GB HBM3", "Tesla T4") is of the requested model ("h100-mega")."""
    model, words = (re.findall(r"[A-Z0-9]+", name.upper()) for name in (requested, device))
    model = [word for word in model if word not in _NO_MODEL and not re.fullmatch(r"\d+GB", word)]
    return bool(model) and set(model) <= set(words)


_NO_MODEL = frozenset({"NVIDIA", "TESLA", "MEGA"})

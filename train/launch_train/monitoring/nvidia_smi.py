"""Parse `nvidia-smi -q -x`, whose element names differ between driver versions, and the matrix of `nvidia-smi topo -m`.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

SLOWDOWNS: Final = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Throttle reasons that a healthy idle GPU never has."""


class GpuProcess(NamedTuple):
    """A compute process on a GPU; `memory_gb` is None if the driver does not report it."""

    pid: int
    name: str
    memory_gb: float | None


class Card(NamedTuple):
    """A GPU. None or empty means that nvidia-smi does not report the value, or that the GPU does not have it."""

    number: int
    name: str
    memory_gb: float | None = None
    used_gb: float | None = None
    persistence: bool | None = None
    mig: bool = False
    mig_devices: int = 0
    compute_mode: str = ""
    recovery: str = ""
    """Recovery action that the driver requests: Reset, Reboot, Drain and Reset, or Drain P2P."""
    uncorrectable: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    remap_pending: bool = False
    remap_failed: bool = False
    power_limit_w: float | None = None
    usual_power_w: float | None = None
    clock_mhz: float | None = None
    usual_clock_mhz: float | None = None
    slowed: tuple[str, ...] = ()
    fabric: str = ""
    """Registration state of a GPU behind NVSwitch; Completed when it is ready."""
    processes: tuple[GpuProcess, ...] = ()


class SmiReport(NamedTuple):
    """Driver version, highest supported CUDA version, GPUs, and nvidia-smi's lines about lost GPUs."""

    driver: str = ""
    cuda: str = ""
    cards: tuple[Card, ...] = ()
    lost: tuple[str, ...] = ()


def parse_smi_report(text: str) -> SmiReport | None:
    """Parse the output of `nvidia-smi -q -x`, including lines about lost GPUs before the XML; None if it is neither."""
    from xml.etree.ElementTree import ParseError, fromstring

    lost = tuple(line.strip() for line in text.splitlines() if _LOST.search(line))
    begin = text.find("<nvidia_smi_log")
    try:
        root = fromstring(text[begin:].strip()) if begin >= 0 else None  # noqa: S314 - from the driver's own tool
    except ParseError:
        root = None
    if root is None:
        return SmiReport(lost=lost) if lost else None
    cards = tuple(_card(number, gpu) for number, gpu in enumerate(root.findall("gpu")))
    return SmiReport(_element_text(root, "driver_version"), _element_text(root, "cuda_version"), cards, lost)


_LOST = re.compile(r"Unable to determine the device handle|GPU is lost", re.IGNORECASE)


def _card(number: int, gpu: Element) -> Card:
    needs_reset = _any_yes(gpu, "gpu_reset_status/reset_required")
    return Card(
        number,
        _element_text(gpu, "product_name"),
        memory_gb=_gigabytes(_element_text(gpu, "fb_memory_usage/total")),
        used_gb=_gigabytes(_element_text(gpu, "fb_memory_usage/used")),
        persistence={"Enabled": True, "Disabled": False}.get(_element_text(gpu, "persistence_mode")),
        mig=_element_text(gpu, "mig_mode/current_mig") == "Enabled",
        mig_devices=len(gpu.findall("mig_devices/mig_device")),
        compute_mode=_element_text(gpu, "compute_mode"),
        recovery=_element_text(gpu, "gpu_recovery_action") or ("Reset" if needs_reset else ""),
        uncorrectable=_uncorrectable(gpu.find("ecc_errors/volatile")),
        remap_pending=_any_yes(gpu, "remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"),
        remap_failed=_any_yes(gpu, "remapped_rows/remapped_row_failure"),
        power_limit_w=_first_number(gpu, *_POWER_LIMITS),
        usual_power_w=_first_number(gpu, *_USUAL_POWER),
        clock_mhz=_first_number(gpu, "applications_clocks/graphics_clock"),
        usual_clock_mhz=_first_number(gpu, "default_applications_clocks/graphics_clock"),
        slowed=tuple(name for name in SLOWDOWNS if _active(gpu, name)),
        fabric=_element_text(gpu, "fabric/state"),
        processes=tuple(_compute_processes(gpu)),
    )


_POWER_LIMITS = (
    "gpu_power_readings/current_power_limit",
    "gpu_power_readings/power_limit",
    "power_readings/enforced_power_limit",
    "power_readings/power_limit",
)
_USUAL_POWER = ("gpu_power_readings/default_power_limit", "power_readings/default_power_limit")


def _element_text(element: Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    return "" if text in ("N/A", "[N/A]", "None") else text


def _leading_number(text: str) -> float | None:
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else None


def _gigabytes(text: str) -> float | None:
    """Convert a text in MiB to decimal GB, the unit used throughout."""
    number = _leading_number(text)
    return None if number is None else round(number * 2**20 / 1e9, 2)


def _first_number(element: Element, *paths: str) -> float | None:
    numbers = (_leading_number(_element_text(element, path)) for path in paths)
    return next((number for number in numbers if number is not None), None)


def _any_yes(gpu: Element, *paths: str) -> bool:
    return any(_element_text(gpu, path) == "Yes" for path in paths)


def _active(gpu: Element, name: str) -> bool:
    paths = (
        f"clocks_event_reasons/clocks_event_reason_{name}",
        f"clocks_throttle_reasons/clocks_throttle_reason_{name}",
    )
    return any(_element_text(gpu, path) == "Active" for path in paths)


def _uncorrectable(errors: Element | None) -> int:
    """Return uncorrectable errors: counters named *uncorrectable* since Turing, double-bit totals before."""
    if errors is None:
        return 0
    texts = [child.text for child in errors if "uncorrectable" in child.tag] or [errors.findtext("double_bit/total")]
    return sum(int(_leading_number((text or "").strip()) or 0) for text in texts)


def _compute_processes(gpu: Element) -> Iterator[GpuProcess]:
    """Yield the compute processes, without graphics ones (type G)."""
    for process in gpu.findall("processes/process_info"):
        if "C" in _element_text(process, "type"):
            name, pid = _element_text(process, "process_name") or "a process", _element_text(process, "pid")
            memory = _gigabytes(_element_text(process, "used_memory"))
            yield GpuProcess(int(_leading_number(pid) or 0), name, memory)


def links(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse the GPU matrix of `nvidia-smi topo -m`: NV18, PIX, PHB, SYS …; X on the diagonal. Empty without one."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    rows = [words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    whole = all(len(row) >= len(rows) for row in rows)
    return tuple(tuple(row[: len(rows)]) for row in rows) if whole else ()

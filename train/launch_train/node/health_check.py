"""Check whether this machine is fit for the run: facts are gathered once, and a pure function assesses them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from launch_train.common import contract
from launch_train.common.errors import UsageError
from launch_train.monitoring import health, nvidia_smi
from launch_train.monitoring.health import GpuFault
from launch_train.monitoring.nvidia_smi import Card

SHM_LIMIT: Final = 1 << 30
"""Bytes of /dev/shm below which DataLoader workers and NCCL are known to fail; a plain container has 64 MiB."""

SMI_SECONDS: Final = 60.0
"""Time limit of all nvidia-smi calls together: without persistence mode it first wakes each GPU."""

LEAST_MEMORY: Final = 0.9
"""Fraction of the requested memory below which it is another GPU."""


@dataclass(frozen=True)
class Facts:
    """Facts about the machine.

    `shm_bytes` is None without /dev/shm. `driver`, the CUDA version that it supports (`cuda`) and that of the image
    (`image_cuda`) are empty if unknown. `links` is the matrix of smi.links. `lost` are nvidia-smi's lines about
    unreachable GPUs, `error` is its output if it failed.
    """

    gpus: int
    gpu: str
    driver: str
    shm_bytes: int | None
    cuda: str = ""
    image_cuda: str = ""
    cards: tuple[Card, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    lost: tuple[str, ...] = ()
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, for the run folder."""
        cards = [
            card._asdict() | {"processes": [process._asdict() for process in card.processes]} for card in self.cards
        ]
        return {**asdict(self), "cards": cards}


@dataclass(frozen=True)
class Findings:
    """`unfit` is the reason to end the start, in one line; each of `warnings` is printed."""

    unfit: str = ""
    warnings: tuple[str, ...] = ()


def inspect_machine(environ: Mapping[str, str]) -> Facts:
    """Gather facts from nvidia-smi (the NVIDIA runtime mounts it into every container), /dev/shm and torch's CUDA
    version."""
    shm = _shm_bytes()
    if not shutil.which("nvidia-smi"):
        return Facts(0, "", "", shm)
    (code, output), (_, matrix) = _query(["-q", "-x"], ["topo", "-m"])
    report = nvidia_smi.read(output)
    if report is None or not report.cards:
        report = _names_only(report.lost if report else ())
    shown = _visible(len(report.cards), environ)
    return Facts(
        shown,
        report.cards[0].name if report.cards else "",
        report.driver,
        shm,
        cuda=report.cuda,
        image_cuda=_image_cuda(),
        cards=_visible_cards(report.cards, environ) if shown else (),
        links=nvidia_smi.links(matrix),
        lost=report.lost,
        error=_first_line(output) if code and not report.cards else "",
    )


def assess(facts: Facts, *, processes: int | None, wanted: Mapping[str, Any], cloud: bool) -> Findings:
    """Return what is wrong with the machine for `processes` processes (None: one per GPU).

    | finding                                                        | in the cloud |
    |----------------------------------------------------------------|--------------|
    | fewer GPUs than processes; one that is lost                    | ends         |
    | a driver too old for the image's CUDA, or for `wanted`         | ends         |
    | the driver requests a reset or reboot; memory is beyond repair | ends         |
    | compute mode Prohibited; MIG without an instance               | ends         |
    | another GPU than requested, or less memory                     | warns        |
    | uncorrectable memory errors, memory repaired at the next reset | warns        |
    | another process on a GPU, memory in use, Exclusive, MIG        | warns        |
    | pairs of GPUs without NVLink, NVSwitch not ready               | warns        |
    | a lowered power limit or clock, a slowdown when idle           | warns        |
    | /dev/shm of less than SHM_LIMIT                                | warns        |

    In a rehearsal all of it warns, and the run continues, on the CPU if necessary.
    """
    gpu_faults = [
        *_gpu_count_faults(facts, processes, wanted),
        *_driver_faults(facts, wanted),
        *_gpu_type_faults(facts, wanted),
    ]
    gpu_faults += [*health.faults(facts.cards, facts.links), *_shm_faults(facts)]
    serious = [fault.text for fault in gpu_faults if fault.is_fatal]
    warnings = [fault.text for fault in gpu_faults if not fault.is_fatal]
    if cloud and serious:
        return Findings("; ".join(serious), tuple(warnings))
    how = "continuing" if facts.gpus else "continuing on CPU"
    return Findings("", (*(f"{line}; {how}" for line in serious), *warnings))


def _gpu_count_faults(facts: Facts, processes: int | None, wanted: Mapping[str, Any]) -> Iterator[GpuFault]:
    name, needed = wanted.get("name"), processes or 1
    if name and facts.gpus < needed:
        why = f": nvidia-smi: {facts.error}" if facts.error else ""
        yield GpuFault(f"found {facts.gpus} of {needed} GPUs ({name}){why}", is_fatal=True)
    for line in facts.lost:
        if line != facts.error:
            yield GpuFault(f"a GPU is lost; it needs a reset or another machine: nvidia-smi: {line}", is_fatal=True)


def _driver_faults(facts: Facts, wanted: Mapping[str, Any]) -> Iterator[GpuFault]:
    minimum = wanted.get("min_driver")
    if fault := health.cuda_fault(facts.driver, facts.cuda, facts.image_cuda):
        yield fault
    elif minimum and facts.driver and _version(facts.driver) < _version(str(minimum)):
        yield GpuFault(f"the NVIDIA driver is {facts.driver}, but the image needs {minimum} or newer", is_fatal=True)


def _gpu_type_faults(facts: Facts, wanted: Mapping[str, Any]) -> Iterator[GpuFault]:
    name, memory = str(wanted.get("name") or ""), wanted.get("memory_gb")
    others = [card for card in facts.cards if name and not health.is_gpu(name, card.name)]
    if others:
        yield GpuFault(f"GPU {others[0].number} is {others[0].name}, but {name} was requested")
    small = [card for card in facts.cards if memory and (card.memory_gb or memory) < LEAST_MEMORY * memory]
    if small and not others:
        yield GpuFault(f"GPU {small[0].number} has {small[0].memory_gb:.0f} GB, but {memory} GB were requested")


def _shm_faults(facts: Facts) -> Iterator[GpuFault]:
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_LIMIT:
        yield GpuFault(
            f"shared memory (/dev/shm) has {facts.shm_bytes >> 20} MiB: "
            "DataLoader workers and NCCL may fail with a bus error; "
            "start the container with more (docker run --shm-size=8g)"
        )


def whole_number(environ: Mapping[str, str], name: str, *, least: int) -> int | None:
    """Return a number of the request; None if it isn't set. Raises UsageError."""
    text = environ.get(name, "")
    if text and not (text.isdecimal() and int(text) >= least):
        raise UsageError(f"{name}={text!r} must be a whole number from {least}")
    return int(text) if text else None


def wanted_gpu(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the requested GPU (contract.GPU); empty for none. Raises UsageError."""
    try:
        gpu = json.loads(environ.get(contract.GPU) or "{}")
    except ValueError as error:
        raise UsageError(f"{contract.GPU} is not JSON: {error}") from error
    if not isinstance(gpu, dict):
        raise UsageError(f"{contract.GPU} must be a JSON object")
    return gpu


def _query(*queries: Sequence[str]) -> list[tuple[int, str]]:
    """Run several nvidia-smi queries at the same time; return their exit codes and outputs."""
    until = time.monotonic() + SMI_SECONDS
    children = [_start_query(query) for query in queries]
    return [_read_query(child, until) for child in children]


def _start_query(query: Sequence[str]) -> subprocess.Popen[str] | None:
    pipe, both, none = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
    try:
        return subprocess.Popen(
            ["nvidia-smi", *query], stdin=none, stdout=pipe, stderr=both, text=True, errors="replace"
        )
    except OSError:
        return None


def _read_query(child: subprocess.Popen[str] | None, until: float) -> tuple[int, str]:
    if child is None:
        return 1, "can't be started"
    with suppress(subprocess.TimeoutExpired):
        output, _ = child.communicate(timeout=max(0.1, until - time.monotonic()))
        return child.returncode, output
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # it may hang forever in the driver, where no signal reaches it
        child.communicate(timeout=1.0)
    return 1, f"no output for {SMI_SECONDS:.0f} seconds"


def _names_only(lost: tuple[str, ...]) -> nvidia_smi.SmiReport:
    """Return name and driver of each GPU where the full report is unavailable; none if nvidia-smi fails."""
    [(code, output)] = _query(["--query-gpu=name,driver_version", "--format=csv,noheader"])
    rows = [line.rpartition(",") for line in output.splitlines() if "," in line and not code]
    cards = tuple(Card(number, name.strip()) for number, (name, _, _) in enumerate(rows))
    return nvidia_smi.SmiReport(rows[0][2].strip() if rows else "", cards=cards, lost=lost)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _image_cuda() -> str:
    """Return the CUDA version of the installed torch, without importing it; empty for none."""
    spec = find_spec("torch")
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
        if match := re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE):
            return match[1]
    return ""


def _visible(count: int, environ: Mapping[str, str]) -> int:
    """Return how many GPUs the processes see: CUDA_VISIBLE_DEVICES hides GPUs from them, not from nvidia-smi. An entry
    of -1 ends its list."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return count
    entries = _entries(visible)
    return len(entries) if "MIG" in visible else min(count, len(entries))


def _visible_cards(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[Card, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists by number; all of them if it lists names."""
    entries = _entries(environ.get("CUDA_VISIBLE_DEVICES", ""))
    if not entries or not all(entry.isdecimal() for entry in entries):
        return cards
    return tuple(card for card in cards if card.number in map(int, entries))


def _entries(visible: str) -> list[str]:
    return list(takewhile(lambda entry: entry not in ("", "-1"), (part.strip() for part in visible.split(","))))


def _shm_bytes() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108 — read only
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

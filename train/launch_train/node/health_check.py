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
    shm = None
    with suppress(OSError):
        stat = os.statvfs("/dev/shm")  # noqa: S108 — read only
        shm = stat.f_blocks * stat.f_frsize
    if not shutil.which("nvidia-smi"):
        return Facts(0, "", "", shm)
    (code, output), (_, matrix) = _query(["-q", "-x"], ["topo", "-m"])
    report = nvidia_smi.parse_smi_report(output)
    if report is None or not report.cards:
        # The full report is unavailable: name and driver of each GPU; none if nvidia-smi fails.
        [(csv_code, csv)] = _query(["--query-gpu=name,driver_version", "--format=csv,noheader"])
        rows = [line.rpartition(",") for line in csv.splitlines() if "," in line and not csv_code]
        cards = tuple(Card(number, name.strip()) for number, (name, _, _) in enumerate(rows))
        lost = report.lost if report else ()
        report = nvidia_smi.SmiReport(rows[0][2].strip() if rows else "", cards=cards, lost=lost)
    shown, cards = _visible_gpus(report.cards, environ)
    return Facts(
        shown,
        report.cards[0].name if report.cards else "",
        report.driver,
        shm,
        cuda=report.cuda,
        image_cuda=_image_cuda(),
        cards=cards,
        links=nvidia_smi.links(matrix),
        lost=report.lost,
        error=next(iter(output.strip().splitlines()), "").strip() if code and not report.cards else "",
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
    gpu_faults = [*_machine_faults(facts, processes, wanted), *health.faults(facts.cards, facts.links)]
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_LIMIT:
        shm = f"shared memory (/dev/shm) has {facts.shm_bytes >> 20} MiB: DataLoader workers and NCCL may fail with a "
        gpu_faults.append(GpuFault(f"{shm}bus error; start the container with more (docker run --shm-size=8g)"))
    serious = [fault.text for fault in gpu_faults if fault.is_fatal]
    warnings = [fault.text for fault in gpu_faults if not fault.is_fatal]
    if cloud and serious:
        return Findings("; ".join(serious), tuple(warnings))
    how = "continuing" if facts.gpus else "continuing on CPU"
    return Findings("", (*(f"{line}; {how}" for line in serious), *warnings))


def _machine_faults(facts: Facts, processes: int | None, wanted: Mapping[str, Any]) -> Iterator[GpuFault]:
    """Yield what differs from the requested machine: the number of GPUs, the driver, the type of GPU."""
    name, memory, minimum = wanted.get("name"), wanted.get("memory_gb"), wanted.get("min_driver")
    if name and facts.gpus < (processes or 1):
        why = f": nvidia-smi: {facts.error}" if facts.error else ""
        yield GpuFault(f"found {facts.gpus} of {processes or 1} GPUs ({name}){why}", is_fatal=True)
    for line in facts.lost:
        if line != facts.error:
            yield GpuFault(f"a GPU is lost; it needs a reset or another machine: nvidia-smi: {line}", is_fatal=True)
    if fault := health.cuda_fault(facts.driver, facts.cuda, facts.image_cuda):
        yield fault
    elif minimum and facts.driver and _version_numbers(facts.driver) < _version_numbers(str(minimum)):
        yield GpuFault(f"the NVIDIA driver is {facts.driver}, but the image needs {minimum} or newer", is_fatal=True)
    others = [card for card in facts.cards if name and not health.is_gpu(str(name), card.name)]
    small = [card for card in facts.cards if memory and (card.memory_gb or memory) < LEAST_MEMORY * memory]
    if others:
        yield GpuFault(f"GPU {others[0].number} is {others[0].name}, but {name} was requested")
    elif small:
        yield GpuFault(f"GPU {small[0].number} has {small[0].memory_gb:.0f} GB, but {memory} GB were requested")


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


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
    pipe, both, none = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
    until, children, results = time.monotonic() + SMI_SECONDS, list[subprocess.Popen[str] | None](), []
    for query in queries:
        try:
            command = ["nvidia-smi", *query]
            child = subprocess.Popen(command, stdin=none, stdout=pipe, stderr=both, text=True, errors="replace")
        except OSError:
            child = None
        children.append(child)
    for child in children:
        result = (1, f"no output for {SMI_SECONDS:.0f} seconds" if child else "can't be started")
        if child:
            try:
                output, _ = child.communicate(timeout=max(0.1, until - time.monotonic()))
                result = (child.returncode, output)
            except subprocess.TimeoutExpired:
                child.kill()
                with suppress(subprocess.TimeoutExpired):  # it may hang forever in the driver, out of a signal's reach
                    child.communicate(timeout=1.0)
        results.append(result)
    return results


def _image_cuda() -> str:
    """Return the CUDA version of the installed torch, without importing it; empty for none."""
    spec = find_spec("torch")
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
        if match := re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE):
            return match[1]
    return ""


def _visible_gpus(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[int, tuple[Card, ...]]:
    """Return how many GPUs the processes see, and which: CUDA_VISIBLE_DEVICES hides GPUs from them, not from
    nvidia-smi. An entry of -1 ends its list. If it lists names, it may be any of the GPUs."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not cards:
        return len(cards), cards
    entries = [*takewhile(lambda entry: entry not in ("", "-1"), (part.strip() for part in visible.split(",")))]
    count = len(entries) if "MIG" in visible else min(len(cards), len(entries))
    if count and all(entry.isdecimal() for entry in entries):
        cards = tuple(card for card in cards if card.number in map(int, entries))
    return count, cards if count else ()

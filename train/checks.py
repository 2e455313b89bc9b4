"""Is this machine fit for the run? Facts are gathered once; what they mean is decided by a pure function."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Final

from train import contract
from train.errors import UsageError

SHM_LIMIT: Final = 1 << 30
"""Bytes of /dev/shm below which DataLoader workers and NCCL are known to fail; a plain container has 64 MiB."""


@dataclass(frozen=True)
class Facts:
    """What the machine is. `shm_bytes` is None where there is no /dev/shm, `driver` empty without a GPU."""

    gpus: int
    gpu: str
    driver: str
    shm_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """For the run folder."""
        return asdict(self)


@dataclass(frozen=True)
class Findings:
    """`unfit` ends the start with one line; each of `warnings` is printed."""

    unfit: str = ""
    warnings: tuple[str, ...] = ()


def gather(environ: Mapping[str, str]) -> Facts:
    """Look at the machine: nvidia-smi (the NVIDIA runtime puts it into every container) and /dev/shm."""
    rows = _nvidia_smi()
    gpu, driver = rows[0] if rows else ("", "")
    return Facts(_visible(len(rows), environ), gpu, driver, _shm_bytes())


def judge(facts: Facts, *, processes: int | None, wanted: Mapping[str, Any], cloud: bool) -> Findings:
    """What is wrong with the machine for `processes` processes (None: as many as there are GPUs).

    In the cloud a missing GPU or an old driver is the end; a rehearsal goes on with the CPU.
    """
    serious, warnings = [], []
    name, minimum = wanted.get("name"), wanted.get("min_driver")
    needed = processes or 1
    if name and facts.gpus < needed:
        serious.append(f"{facts.gpus} of {needed} GPUs ({name}) are visible")
    if minimum and facts.driver and _version(facts.driver) < _version(str(minimum)):
        serious.append(f"the NVIDIA driver is {facts.driver}, but the image needs {minimum} or newer")
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_LIMIT:
        warnings.append(
            f"shared memory (/dev/shm) has {facts.shm_bytes >> 20} MiB: "
            "DataLoader workers and NCCL may fail with a bus error; "
            "start the container with more (docker run --shm-size=8g)"
        )
    if cloud and serious:
        return Findings("; ".join(serious), tuple(warnings))
    return Findings("", (*(f"{line}; going on, as this is not the cloud" for line in serious), *warnings))


def whole_number(environ: Mapping[str, str], name: str, *, least: int) -> int | None:
    """A number of the request, or None when it isn't there. Raises UsageError."""
    text = environ.get(name, "")
    if text and not (text.isdecimal() and int(text) >= least):
        raise UsageError(f"{name}={text!r} must be a whole number from {least}")
    return int(text) if text else None


def wanted_gpu(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The GPU that was asked for (contract.GPU); empty for none. Raises UsageError."""
    try:
        gpu = json.loads(environ.get(contract.GPU) or "{}")
    except ValueError as error:
        raise UsageError(f"{contract.GPU} is not JSON: {error}") from error
    if not isinstance(gpu, dict):
        raise UsageError(f"{contract.GPU} must be a JSON object")
    return gpu


def _nvidia_smi() -> Sequence[tuple[str, str]]:
    """Name and driver of each GPU; none when there is no nvidia-smi or it fails."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.rpartition(",") for line in done.stdout.splitlines() if "," in line)
    return [(name.strip(), driver.strip()) for name, _, driver in rows]


def _visible(count: int, environ: Mapping[str, str]) -> int:
    """CUDA_VISIBLE_DEVICES hides GPUs from the processes, not from nvidia-smi; an entry of -1 ends its list."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return count
    entries = list(takewhile(lambda entry: entry not in ("", "-1"), (part.strip() for part in chosen.split(","))))
    return len(entries) if "MIG" in chosen else min(count, len(entries))


def _shm_bytes() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108 — it is looked at, not written to
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

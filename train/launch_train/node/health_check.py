"""Is this machine fit for the run? Facts are gathered once; what they mean is decided by a pure function."""

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
from launch_train.monitoring.health import Fault
from launch_train.monitoring.nvidia_smi import Card

SHM_LIMIT: Final = 1 << 30
"""Bytes of /dev/shm below which DataLoader workers and NCCL are known to fail; a plain container has 64 MiB."""

SMI_SECONDS: Final = 60.0
"""For all questions to nvidia-smi together: without persistence mode it wakes each GPU up first."""

LEAST_MEMORY: Final = 0.9
"""Of the memory that was asked for: less is another GPU."""


@dataclass(frozen=True)
class Facts:
    """What the machine is. `shm_bytes` is None where there is no /dev/shm; `driver`, the CUDA that it supports and the
    CUDA of the image are empty where they are unknown. `links` is the matrix of smi.links, `lost` and `said` are
    nvidia-smi's own lines about GPUs that can't be reached and about why it failed."""

    gpus: int
    gpu: str
    driver: str
    shm_bytes: int | None
    cuda: str = ""
    image_cuda: str = ""
    cards: tuple[Card, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()
    lost: tuple[str, ...] = ()
    said: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For the run folder."""
        cards = [card._asdict() | {"processes": [one._asdict() for one in card.processes]} for card in self.cards]
        return {**asdict(self), "cards": cards}


@dataclass(frozen=True)
class Findings:
    """`unfit` ends the start with one line; each of `warnings` is printed."""

    unfit: str = ""
    warnings: tuple[str, ...] = ()


def gather(environ: Mapping[str, str]) -> Facts:
    """Look at the machine: nvidia-smi (the NVIDIA runtime puts it into every container), /dev/shm and torch's CUDA."""
    shm = _shm_bytes()
    if not shutil.which("nvidia-smi"):
        return Facts(0, "", "", shm)
    (code, said), (_, matrix) = _ask(["-q", "-x"], ["topo", "-m"])
    report = nvidia_smi.read(said)
    if report is None or not report.cards:
        report = _named(report.lost if report else ())
    shown = _visible(len(report.cards), environ)
    return Facts(
        shown,
        report.cards[0].name if report.cards else "",
        report.driver,
        shm,
        cuda=report.cuda,
        image_cuda=_image_cuda(),
        cards=_chosen(report.cards, environ) if shown else (),
        links=nvidia_smi.links(matrix),
        lost=report.lost,
        said=_first_line(said) if code and not report.cards else "",
    )


def judge(facts: Facts, *, processes: int | None, wanted: Mapping[str, Any], cloud: bool) -> Findings:
    """What is wrong with the machine for `processes` processes (None: as many as there are GPUs).

    | finding                                                        | in the cloud |
    |----------------------------------------------------------------|--------------|
    | fewer GPUs than processes; one that is lost                    | ends         |
    | a driver too old for the image's CUDA, or for `wanted`         | ends         |
    | the driver asks for a reset or a reboot; memory can't be mended| ends         |
    | compute mode Prohibited; MIG without an instance               | ends         |
    | another GPU than was asked for, or less memory                 | warns        |
    | uncorrectable memory errors, memory to be mended at a reset    | warns        |
    | another process on a GPU, memory in use, Exclusive, MIG        | warns        |
    | pairs of GPUs without NVLink, NVSwitch that isn't ready        | warns        |
    | a lowered power limit or clock, a slowdown without work        | warns        |
    | /dev/shm of less than SHM_LIMIT                                | warns        |

    Elsewhere, in a rehearsal, all of it warns: it goes on, on the CPU if need be.
    """
    found = [*_counted(facts, processes, wanted), *_of_software(facts, wanted), *_of_kind(facts, wanted)]
    found += [*health.faults(facts.cards, facts.links), *_of_shm(facts)]
    serious, warnings = [one.text for one in found if one.ends], [one.text for one in found if not one.ends]
    if cloud and serious:
        return Findings("; ".join(serious), tuple(warnings))
    return Findings("", (*(f"{line}; a rehearsal goes on" for line in serious), *warnings))


def _counted(facts: Facts, processes: int | None, wanted: Mapping[str, Any]) -> Iterator[Fault]:
    name, needed = wanted.get("name"), processes or 1
    if name and facts.gpus < needed:
        why = f": nvidia-smi says: {facts.said}" if facts.said else ""
        yield Fault(f"{facts.gpus} of {needed} GPUs ({name}) are visible{why}", ends=True)
    for line in facts.lost:
        if line != facts.said:
            yield Fault(f"a GPU is lost, and needs a reset or another machine: nvidia-smi says: {line}", ends=True)


def _of_software(facts: Facts, wanted: Mapping[str, Any]) -> Iterator[Fault]:
    minimum = wanted.get("min_driver")
    if fault := health.cuda_fault(facts.driver, facts.cuda, facts.image_cuda):
        yield fault
    elif minimum and facts.driver and _version(facts.driver) < _version(str(minimum)):
        yield Fault(f"the NVIDIA driver is {facts.driver}, but the image needs {minimum} or newer", ends=True)


def _of_kind(facts: Facts, wanted: Mapping[str, Any]) -> Iterator[Fault]:
    name, memory = str(wanted.get("name") or ""), wanted.get("memory_gb")
    others = [card for card in facts.cards if name and not health.is_gpu(name, card.name)]
    if others:
        yield Fault(f"GPU {others[0].number} is {others[0].name}, but {name} was asked for")
    small = [card for card in facts.cards if memory and (card.memory_gb or memory) < LEAST_MEMORY * memory]
    if small and not others:
        yield Fault(f"GPU {small[0].number} has {small[0].memory_gb:.0f} GB, but {memory} were asked for")


def _of_shm(facts: Facts) -> Iterator[Fault]:
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_LIMIT:
        yield Fault(
            f"shared memory (/dev/shm) has {facts.shm_bytes >> 20} MiB: "
            "DataLoader workers and NCCL may fail with a bus error; "
            "start the container with more (docker run --shm-size=8g)"
        )


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


def _ask(*questions: Sequence[str]) -> list[tuple[int, str]]:
    """The exit code and the words of nvidia-smi to each of these, which it is asked at the same time."""
    until = time.monotonic() + SMI_SECONDS
    children = [_started(question) for question in questions]
    return [_answer(child, until) for child in children]


def _started(question: Sequence[str]) -> subprocess.Popen[str] | None:
    pipe, both, none = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
    try:
        return subprocess.Popen(
            ["nvidia-smi", *question], stdin=none, stdout=pipe, stderr=both, text=True, errors="replace"
        )
    except OSError:
        return None


def _answer(child: subprocess.Popen[str] | None, until: float) -> tuple[int, str]:
    if child is None:
        return 1, "it can't be started"
    with suppress(subprocess.TimeoutExpired):
        said, _ = child.communicate(timeout=max(0.1, until - time.monotonic()))
        return child.returncode, said
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # in the driver, where no signal reaches it, it may hang for ever
        child.communicate(timeout=1.0)
    return 1, f"nothing for {SMI_SECONDS:.0f} seconds"


def _named(lost: tuple[str, ...]) -> nvidia_smi.Report:
    """Name and driver of each GPU, where nvidia-smi tells no more; none when it fails."""
    [(code, said)] = _ask(["--query-gpu=name,driver_version", "--format=csv,noheader"])
    rows = [line.rpartition(",") for line in said.splitlines() if "," in line and not code]
    cards = tuple(Card(number, name.strip()) for number, (name, _, _) in enumerate(rows))
    return nvidia_smi.Report(rows[0][2].strip() if rows else "", cards=cards, lost=lost)


def _first_line(said: str) -> str:
    return next((line.strip() for line in said.splitlines() if line.strip()), "")


def _image_cuda() -> str:
    """The CUDA that this Python's torch was built for, without importing it; empty for none."""
    spec = find_spec("torch")
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
        if found := re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE):
            return found[1]
    return ""


def _visible(count: int, environ: Mapping[str, str]) -> int:
    """CUDA_VISIBLE_DEVICES hides GPUs from the processes, not from nvidia-smi; an entry of -1 ends its list."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return count
    entries = _entries(chosen)
    return len(entries) if "MIG" in chosen else min(count, len(entries))


def _chosen(cards: tuple[Card, ...], environ: Mapping[str, str]) -> tuple[Card, ...]:
    """Those that CUDA_VISIBLE_DEVICES shows by their numbers; all of them where it has names."""
    entries = _entries(environ.get("CUDA_VISIBLE_DEVICES", ""))
    if not entries or not all(entry.isdecimal() for entry in entries):
        return cards
    return tuple(card for card in cards if card.number in map(int, entries))


def _entries(chosen: str) -> list[str]:
    return list(takewhile(lambda entry: entry not in ("", "-1"), (part.strip() for part in chosen.split(","))))


def _shm_bytes() -> int | None:
    try:
        stat = os.statvfs("/dev/shm")  # noqa: S108 — it is looked at, not written to
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))

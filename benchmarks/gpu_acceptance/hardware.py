"""Part 1: check the machine: its tools, its health, and communication between its GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_acceptance.machine import versions
from benchmarks.gpu_acceptance.running import program, torchrun
from benchmarks.gpu_acceptance.small import all_of, check
from benchmarks.gpu_acceptance.tasks import Measured, Place, SkipRow, Task, Verdict

QUERY: Final = ("name", "memory.total", "driver_version", "pstate", "mig.mode.current", "compute_mode")


def _facts(place: Place) -> Measured:
    import torch

    folder = "/dev/shm"
    return {
        "gpus": place.gpus,
        "smi": _smi(QUERY) if place.gpus else [],
        "versions": versions(),
        "torch": _torch(place),
        "compiler": shutil.which("cc") is not None or shutil.which("gcc") is not None,
        "shm_gb": round(shutil.disk_usage(folder).total / 1e9, 2) if Path(folder).is_dir() else 0,
        "scratch_free_gb": round(shutil.disk_usage(place.folder).free / 1e9, 1),
        "cores": len(os.sched_getaffinity(0)),
        "root": os.geteuid() == 0,
        "open_files": _limits(),
        "product": float((torch.ones(64, 64, device=place.device) @ torch.ones(64, 64, device=place.device)).sum()),
    }


def _torch(place: Place) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    if place.gpus:
        each = torch.cuda.get_device_properties(place.device)
        found |= {"names": [torch.cuda.get_device_name(index) for index in range(place.gpus)]}
        found |= {"capability": [each.major, each.minor], "memory_gb": round(each.total_memory / 1e9, 1)}
        found |= {"cudnn": _cudnn_version(), "nccl": _nccl_version()}
    return found


def _cudnn_version() -> Any:
    import torch

    return torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _nccl_version() -> str:
    import torch

    found: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _limits() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _smi(fields: Sequence[str]) -> list[dict[str, str]]:
    """Return nvidia-smi's fields for each GPU; unknown fields are omitted."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        if len(fields) == 1:
            return []
        known = [one for field in fields if (one := _smi([field]))]
        return [{name: value for part in parts for name, value in part.items()} for parts in zip(*known, strict=False)]
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, map(str.strip, row), strict=False)) for row in rows]


def judge_facts(measured: Measured) -> Verdict:
    """Check that torch and nvidia-smi name the same GPUs, and that torch computes on one."""
    gpus, library = measured["gpus"], measured["torch"]
    names, seen = [one.get("name", "") for one in measured["smi"]], library.get("names", [])
    version = tuple(int(part) for part in library["version"].split("+")[0].split(".")[:2])
    return all_of(
        check(version >= (2, 11), f"torch {library['version']} is older than 2.11"),
        check(measured["product"] == 64**3, f"a product of ones sums up to {measured['product']:g}, not {64**3}"),
        check(not gpus or sorted(names) == sorted(seen), f"nvidia-smi names {names}, torch {seen}"),
        check(not gpus or bool(library.get("cudnn") and library.get("nccl")), "cuDNN or NCCL has no version"),
        Verdict(True, ", ".join([*seen, f"torch {library['version']}", *_libraries(library)])),
    )


def _libraries(found: Mapping[str, Any]) -> list[str]:
    return [f"{name} {found[name]}" for name in ("cuda", "cudnn", "nccl") if found.get(name)]


def _imports(place: Place) -> Measured:
    """Import every module of the trainer with this torch."""
    code = (
        "import importlib, json, pkgutil, launch_train\n"
        "failed = {}\n"
        "names = [one.name for one in pkgutil.walk_packages(launch_train.__path__, 'launch_train.')]\n"
        "for name in names:\n"
        "    if not name.endswith(('__main__', 'sitecustomize')):\n"
        "        try: importlib.import_module(name)\n"
        "        except BaseException as error: failed[name] = f'{type(error).__name__}: {error}'\n"
        "print('\\n' + json.dumps({'count': len(names), 'failed': failed}))\n"
    )
    done = program([sys.executable, "-c", code], place, 100)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def judge_imports(measured: Measured) -> Verdict:
    failed = measured["failed"]
    return all_of(
        check(measured["count"] > 50, f"only {measured['count']} modules were found"),
        check(not failed, f"{len(failed)} modules can't be imported: {failed}", f"{measured['count']} modules"),
    )


# --- NVML, health -----------------------------------------------------------------------------------------------------

COMPARED: Final = ("memory.used", "memory.total", "temperature.gpu", "power.draw", "enforced.power.limit", "clocks.mem")


def _nvml(place: Place) -> Measured:
    """Read the GPU with our monitor and with nvidia-smi, while 8 GB are allocated."""
    import torch

    from launch_train.monitoring.nvml import open_gpus

    free, _ = torch.cuda.mem_get_info(place.device)
    held = torch.ones(int(min(8e9, free / 2)) // 4, device=place.device)
    torch.cuda.synchronize()
    gpus = open_gpus(os.environ)
    ours = gpus.sample() if gpus else []
    theirs = _smi(COMPARED)
    later = gpus.sample() if gpus else []
    return {"held_gb": held.numel() * 4 / 1e9, "nvml": ours, "later": later, "smi": theirs}


ALIKE: Final = {
    "memory.used": ("memory_gb", 0.05, 0.9, 2**20 / 1e9),
    "memory.total": ("memory_total_gb", 0.01, 0.9, 2**20 / 1e9),
    "temperature.gpu": ("temp_c", 0.0, 5.0, 1.0),
    "power.draw": ("power_w", 0.15, 40.0, 1.0),
    "enforced.power.limit": ("power_limit_w", 0.01, 1.0, 1.0),
    "clocks.mem": ("memory_mhz", 0.01, 5.0, 1.0),
}
"""nvidia-smi's field -> ours, the tolerances (relative, and in our unit), and the factor between the units. NVML's used
memory includes the driver's share (0.6 GB of an H100), which nvidia-smi leaves out; load changes the power."""


def judge_nvml(measured: Measured) -> Verdict:
    ours, theirs = measured["nvml"], measured["smi"]
    if not ours or not theirs:
        return Verdict(False, f"{len(ours)} GPUs seen by NVML, {len(theirs)} by nvidia-smi")
    found = [_compared(row, said) for row, said in zip(ours, theirs, strict=False)]
    counted = check(len(ours) == len(theirs), f"{len(ours)} GPUs seen by NVML, {len(theirs)} by nvidia-smi")
    holds = check(ours[0].get("memory_gb", 0) >= measured["held_gb"], f"{measured['held_gb']:.1f} GB held are not seen")
    return all_of(counted, holds, *found)


def _compared(ours: Mapping[str, Any], said: Mapping[str, str]) -> Verdict:
    wrong, right = list[str](), list[str]()
    for field, (name, share, most, unit) in ALIKE.items():
        try:
            theirs = float(said[field]) * unit
        except (KeyError, ValueError):
            continue  # nvidia-smi does not report it
        one = ours.get(name)
        ok = one is not None and abs(one - theirs) <= max(share * theirs, most)
        (right if ok else wrong).append(f"{name} {one} (nvidia-smi: {theirs:.4g})")
    return Verdict(not wrong and len(right) >= 2, "; ".join(wrong or right) or "nothing could be compared")


def _health(place: Place) -> Measured:
    from launch_train.node import health_check

    facts = health_check.inspect_machine(os.environ)
    findings = health_check.assess(facts, processes=None, wanted={}, cloud=True)
    cards = [{"name": card.name, "memory_gb": card.memory_gb, "slowed": card.slowed} for card in facts.cards]
    kept = {name: getattr(facts, name) for name in ("gpus", "gpu", "driver", "cuda", "image_cuda", "shm_bytes", "lost")}
    return {**kept, "cards": cards, "unfit": findings.unfit, "warnings": list(findings.warnings), "here": place.gpus}


def judge_health(measured: Measured) -> Verdict:
    memory = [card["memory_gb"] for card in measured["cards"]]
    return all_of(
        check(measured["gpus"] == measured["here"], f"{measured['gpus']} GPUs counted, torch has {measured['here']}"),
        check(not measured["unfit"], f"unfit: {measured['unfit']}"),
        check(bool(measured["driver"] and measured["cuda"]), "nvidia-smi -q -x: no driver or CUDA could be read"),
        check(bool(memory) and all(memory), f"memory of the cards: {memory}"),
        Verdict(
            True, f"driver {measured['driver']}, CUDA {measured['cuda']}; warnings: {measured['warnings'] or 'none'}"
        ),
    )


# --- Bench, NCCL ------------------------------------------------------------------------------------------------------


def _bench(place: Place) -> Measured:
    """Run the program behind `launch bench`; on a CPU only its shortest part."""
    parts = [] if place.gpus else ["--only=memory"]
    program([sys.executable, "-m", "launch_train.bench", "--quick", "--json", "bench.json", *parts], place, 200)
    found = json.loads((place.folder / "bench.json").read_text())
    figures = {name: [one["value"], one["unit"], one["peak"]] for name, one in found["figures"].items()}
    troubles = [trouble for rank in found["ranks"] for trouble in rank["troubles"]]
    return {
        "gpus": place.gpus,
        "ok": found["ok"],
        "findings": found["findings"],
        "figures": figures,
        "troubles": troubles,
    }


def judge_bench(measured: Measured) -> Verdict:
    figures = measured["figures"]
    needed = {"memory copy", *(("matmul bf16", "to GPU, pinned") if measured["gpus"] else ())}
    shown = [f"{name} {value:.4g} {unit}" for name, (value, unit, _) in figures.items()]
    return all_of(
        check(bool(measured["ok"]), f"unfit: {measured['findings']}"),
        check(not measured["troubles"], f"parts failed: {measured['troubles']}"),
        check(needed <= set(figures), f"no figures for {sorted(needed - set(figures))}"),
        check(all(value > 0 for value, _, _ in figures.values()), "a figure is not above 0"),
        Verdict(True, ", ".join(shown[:6])),
    )


def _nccl(place: Place) -> Measured:
    """Run one process per GPU (on a CPU two, over gloo): sums, gathers and broadcasts with known results."""
    world = place.gpus or 2
    if world == 1:
        raise SkipRow("skipped: one GPU exchanges nothing; see two ranks on one GPU")
    env = {"GPU_ACCEPTANCE_OUT": str(place.folder / "ranks.json")}
    program([*torchrun(world), "-m", "benchmarks.gpu_acceptance.ranks"], place, 200, **env)
    found: dict[str, Any] = json.loads((place.folder / "ranks.json").read_text())
    return {**found, "expected": ["nccl" if place.gpus else "gloo", world]}


def judge_nccl(measured: Measured) -> Verdict:
    joined, wrong = [measured["backend"], measured["world"]], measured["wrong"]
    speeds = measured["gbs"]
    return all_of(
        check(joined == measured["expected"], f"ran with {joined}, not {measured['expected']}"),
        check(not wrong, f"wrong results: {wrong}"),
        check(measured["checked"] >= 6, f"only {measured['checked']} results were checked"),
        check(measured["world"] == 1 or bool(speeds), "no bandwidth was measured"),
        check(all(value > 0 for value in speeds.values()), f"bandwidth: {speeds}"),
        Verdict(True, f"{joined}: {measured['checked']} collectives right; GB/s {speeds or 'of one rank: none'}"),
    )


TASKS: Final = (
    Task(1, "facts", "what nvidia-smi and torch say", _facts, judge_facts, 10, on_cpu="no nvidia-smi"),
    Task(1, "imports", "every module of the trainer with this torch", _imports, judge_imports, 12, on_cpu=""),
    Task(1, "health", "the node's checks of its GPUs", _health, judge_health, 8),
    Task(1, "nvml", "the monitor's figures beside nvidia-smi's", _nvml, judge_nvml, 10, alone=True),
    Task(1, "nccl", "collectives on all GPUs", _nccl, judge_nccl, 25, 240, on_cpu="gloo, two processes"),
    Task(
        1,
        "bench",
        "python -m launch_train.bench --quick",
        _bench,
        judge_bench,
        45,
        220,
        on_cpu="memory only",
        alone=True,
    ),
)

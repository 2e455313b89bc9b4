"""Read what the checks need to know of this machine: nvidia-smi, files, and a child process that imports torch.

Each read has a time limit and fails alone; torch is never imported in this process.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from launcher.errors import LaunchError
from launcher.gcp.parallel import together

SECONDS: Final = 90.0
"""Time limit of all reads together: a first import of torch from a slow disk takes a minute."""
COMMAND_SECONDS: Final = 15.0
GPU_FIELDS: Final = (
    *("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap", "compute_mode"),
    "ecc.errors.uncorrected.volatile.total",
)
TORCH: Final = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "archs": torch.cuda.get_arch_list()}
found["available"] = torch.cuda.is_available()
found["gpus"] = torch.cuda.device_count() if found["available"] else 0
found["cudnn"] = torch.backends.cudnn.version() if torch.version.cuda else None
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
except Exception as error:
    found["nccl"] = None
print(json.dumps(found))
"""
NVIDIA: Final = "0x10de"
"""NVIDIA's vendor number on the PCI bus."""


def read(environ: Mapping[str, str], root: Path = Path("/"), seconds: float = SECONDS) -> dict[str, Any]:
    """Return each answer by its name; None: not installed; LaunchError: it could not be read. `root`: folder in whose
    place `/` is read."""
    return together(
        {
            "python": partial(python, environ),
            "torch": partial(torch, environ),
            "gpus": partial(gpus, environ),
            "pci": partial(pci_gpus, root),
            "xids": partial(xids, environ),
            "cuda": partial(cuda, environ, root),
            "memory": partial(space, str(root / "dev/shm")),
            "disk": partial(space, "."),
            "tools": partial(tools, environ),
        },
        seconds,
    )


def python(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return this Python's version and path."""
    return {"version": ".".join(map(str, sys.version_info[:3])), "path": sys.executable}


def torch(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a child process says about torch; None: not installed. Raises LaunchError: its import fails."""
    if find_spec("torch") is None:
        return None
    done = output(environ, sys.executable, "-P", "-c", TORCH, seconds=SECONDS - 5)
    try:
        report: dict[str, Any] = json.loads(done.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise LaunchError("import torch printed something unexpected") from error
    return report


def gpus(environ: Mapping[str, str]) -> list[dict[str, str]] | None:
    """Return nvidia-smi's row of each GPU; None: not installed. Raises LaunchError: it fails."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return None
    text = output(environ, "nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def pci_gpus(root: Path) -> int:
    """Return the number of NVIDIA display controllers (PCI class 0x03) on the bus, with or without a driver."""
    devices = [*(root / "sys/bus/pci/devices").glob("*")]
    return sum(text(device / "vendor") == NVIDIA and text(device / "class").startswith("0x03") for device in devices)


def xids(environ: Mapping[str, str]) -> list[str]:
    """Return the kernel log's lines with an Xid of the NVIDIA driver. Raises LaunchError: the log is not readable."""
    lines = re.findall(r"NVRM: (Xid \([^)]*\): [^\n]*)", output(environ, "dmesg"))
    return [str(line) for line in lines]


def cuda(environ: Mapping[str, str], root: Path) -> dict[str, Any]:
    """Return the CUDA installations, nvcc's version, and the folders of LD_LIBRARY_PATH that hold CUDA libraries."""
    folders = {folder.resolve() for folder in (root / "usr/local").glob("cuda*") if folder.is_dir()}
    shadows = [
        folder
        for folder in environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder and any([*Path(folder).glob("lib" + name)] for name in ("cudart.so*", "cudnn.so*", "nccl.so*"))
    ]
    has_nvcc = shutil.which("nvcc", path=environ.get("PATH")) is not None
    version = re.search(r"release ([\d.]+)", output(environ, "nvcc", "--version")) if has_nvcc else None
    return {
        "installations": sorted(str(folder) for folder in folders),
        "nvcc": version[1] if version else "",
        "shadows": shadows,
    }


def space(path: str) -> dict[str, Any]:
    """Return size and free bytes of a file system. Raises LaunchError."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from error
    return {"path": path, "total": usage.total, "free": usage.free}


def tools(environ: Mapping[str, str]) -> dict[str, bool]:
    """Return which optional tools are installed."""
    commands = {name: shutil.which(name, path=environ.get("PATH")) is not None for name in ("gcloud", "docker")}
    return {**commands, "google": installed("google.cloud.aiplatform_v1")}


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it (only its parent packages)."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def output(environ: Mapping[str, str], *command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return a command's stdout. Raises LaunchError: it fails, is missing, or takes too long."""
    env = {**os.environ, **environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=env)
    except OSError as error:
        raise LaunchError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{Path(command[0]).name} did not end within {seconds:.0f} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LaunchError(f"{Path(command[0]).name} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def text(file: Path) -> str:
    """Return a small file's text; empty if it can't be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""

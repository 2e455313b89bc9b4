"""Identify the machine and the code of the measurements, and list versions for the report."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.gpu_acceptance.tasks import ROOT

PACKAGES: Final = (
    *("torch", "triton", "numpy", "transformers", "torchvision", "accelerate", "tensorboard", "psutil", "pillow"),
    *("nvidia-ml-py", "tokenizers", "pytest", "hypothesis", "sortedcontainers", "msgspec", "google-crc32c"),
)

ASK: Final = """
import json, torch
found = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if found else "CPU"
print(json.dumps({"name": name, "gpus": torch.cuda.device_count() if found else 0, "cuda": torch.version.cuda or ""}))
"""


class Device(NamedTuple):
    """The GPUs of this machine as torch sees them; `name` is CPU if there are none."""

    name: str
    gpus: int
    cuda: str

    @property
    def key(self) -> str:
        """Return the name and number of GPUs, for example `NVIDIA H200` or `2 x NVIDIA L4`."""
        return f"{self.gpus} x {self.name}" if self.gpus > 1 else self.name


def device() -> Device:
    """Detect the GPUs in another process: CUDA must not be used before a fork. Raises SystemExit without torch."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"torch can't be used here: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return Device(**json.loads(done.stdout.strip().splitlines()[-1]))


def commit() -> str:
    """Return LAUNCH_COMMIT, or the commit of this checkout, with + if files have changed.

    Without git, return a digest of the code (`source-…`), which --adopt replaces by the matching commit.
    """
    if told := os.environ.get("LAUNCH_COMMIT"):
        return told[:12]
    return head() or f"source-{source()}"


def head() -> str:
    """Return the checked-out commit, with + if the code has changed; empty without git."""
    found = _git("rev-parse", "--short=10", "HEAD") if (ROOT / ".git").exists() else ""
    return found + ("+" if found and _git("status", "--porcelain", "--", "train", "benchmarks/gpu_acceptance") else "")


def _git(*words: str) -> str:
    """Return what git prints; empty if git is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-c", f"safe.directory={ROOT}", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return ""


def source() -> str:
    """Return a digest of the measured code and the benchmarks."""
    whole = hashlib.sha256()
    for folder in ("train", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()[:10]


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages; "missing" for packages that are not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def torch_version() -> str:
    return version("torch")


def described(found: Device) -> dict[str, Any]:
    """Return the machine's facts for the report, without its name."""
    return {
        "device": found.key,
        "cuda": found.cuda,
        "driver": driver(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "versions": versions(),
    }


def driver() -> str:
    """Return the NVIDIA driver's version; empty without one."""
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        if found := re.search(r"\d+[\d.]+", done.stdout):
            return found[0]
    return ""


def scratch() -> Path:
    """Create a folder on the disk with the most free space, for TMPDIR, torch's caches and all rows."""
    asked = os.environ.get("TMPDIR")
    places = [Path(one) for one in ((asked,) if asked else ("/tmp", "/var/tmp", "/dev/shm")) if Path(one).is_dir()]
    usable = [one for one in places if os.access(one, os.W_OK)]
    best = next((one for one in usable if shutil.disk_usage(one).free > 20e9), None)
    best = best or max(usable, key=lambda one: shutil.disk_usage(one).free, default=Path.cwd())
    return Path(tempfile.mkdtemp(prefix="acceptance-", dir=best))

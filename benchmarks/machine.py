"""Describe the machine of a measurement in one line."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def described(*packages: str) -> str:
    """Return the versions of Python and of the packages, the number of cores and the processor."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"Python {platform.python_version()}, {versions}; {os.cpu_count()} × {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""Detect that the code grew since the job's last local run, usually by output that a script wrote."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.common import contract
from launcher.images.source_files import File
from launcher.plan.binding import NewerFormat, read
from launcher.plan.model import Content, Plan
from launcher.text import plural, size_text

MUCH: Final = 1_000_000
"""Growth in bytes from which on it is reported."""
MOST_NAMED: Final = 3
"""Files that the message names."""


def grown_since(name: str, output: str, files: Sequence[File], content: Content) -> str:
    """Return `29 kB in 10 files -> 179 MB in 11 files since a-1a2b3c4d; out/ckpt.pt (179 MB)`, or "" without growth.

    `output` is a folder with local runs. The named files are newer than that run's plan.
    """
    for path in sorted(
        Path(output).glob(f"{glob.escape(name)}-*/{contract.PLAN}"), key=modification_time, reverse=True
    ):
        plan = stored_plan(path)
        if plan is None or plan.image is None or plan.spec.get("name") != name:
            continue
        if content.size - plan.image.size < MUCH:
            return ""
        newer = [file for file in files if file.link is None and modification_time(file.path) > modification_time(path)]
        sizes = {file.name: file.path.stat().st_size for file in newer}
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:MOST_NAMED]
        before = f"{size_text(plan.image.size)} in {plural(plan.image.files, 'file')}"
        now = f"{size_text(content.size)} in {plural(content.files, 'file')} since {plan.run}"
        return "; ".join([f"{before} -> {now}", *(f"{file} ({size_text(size)})" for file, size in largest)])
    return ""


def modification_time(path: Path) -> float:
    """Return a file's modification time in Unix seconds; 0: unknown."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def stored_plan(path: Path) -> Plan | None:
    """Return the plan in a local run folder's file, or None if it is unreadable."""
    with suppress(OSError, NewerFormat):
        stored = read(path.read_bytes())
        return stored.plan if stored else None
    return None

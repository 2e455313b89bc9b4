"""The accelerators that Vertex accepts with each machine type, from the table machines.csv."""

from __future__ import annotations

import csv
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

Accelerators = dict[str, frozenset[int]]
"""Accelerator type -> allowed counts. Empty: a machine without accelerators."""


def accelerators(machine_type: str) -> Accelerators | None:
    """Return the accelerators of `machine_type`, or None if Vertex does not have it."""
    found = [row for pattern, row in _table() if fnmatchcase(machine_type, pattern)]
    if not found:
        return None
    merged: Accelerators = {}
    for row in found:
        merged.update(row)
    return merged


@cache
def _table() -> list[tuple[str, Accelerators]]:
    lines = Path(__file__).with_name("machines.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [(row["machine_type"], _row(row["accelerator"], row["counts"])) for row in rows]


def _row(accelerator: str, counts: str) -> Accelerators:
    return {accelerator: frozenset(map(int, counts.split()))} if accelerator else {}

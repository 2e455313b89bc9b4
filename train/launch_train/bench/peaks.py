"""Peak figures of each GPU type, by CUDA's device name. A GPU that isn't in the table is unknown.

The table (peaks.csv) repeats the catalog's figures, because train may not import launcher. A test compares the two.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from launch_train.monitoring.health import is_gpu

TABLE: Final = Path(__file__).with_name("peaks.csv")
KINDS: Final = ("bf16", "fp16", "tf32", "fp32")
NUMBERS: Final = (*KINDS, "memory_gbs", "nvlink_gbs", "floor", "memory_floor")
"""Columns of numbers; an empty cell is unknown."""


class GpuType(NamedTuple):
    """One GPU type. None: unknown or not available.

    `tflops`: dense, by number format; `memory_gbs`: memory bandwidth; `nvlink_gbs`: NVLink bandwidth in one direction,
    only for machines whose GPUs are all connected by a switch.

    `floor` and `memory_floor`: shares of the peaks that a large matrix product and a large copy reach at least on a
    healthy card. A card of 75 W or less can't sustain its clocks: L4 reaches 35 to 49 %.
    """

    name: str
    tflops: Mapping[str, float | None]
    memory_gbs: float | None
    nvlink_gbs: float | None
    floor: float
    memory_floor: float


def of(device: str) -> GpuType | None:
    """Return the card for CUDA's device name ("NVIDIA H100 80GB HBM3", "Tesla T4"), or None if unknown."""
    present = _words(device)
    return next((card for words, without, card in _table() if words <= present and not without & present), None)


def requested(gpu: str, device: str) -> Mapping[str, float | None]:
    """Return the peaks from the request (contract.GPU, JSON), by number format.

    Empty if `device` isn't the requested GPU, or is only a part of one (MIG).
    """
    try:
        facts: Any = json.loads(gpu or "{}")
    except ValueError:
        return {}
    if not isinstance(facts, dict) or "MIG" in _words(device):
        return {}
    return dict(facts.get("peak_tflops") or {}) if is_gpu(str(facts.get("name") or ""), device) else {}


def tflops(device: str) -> Mapping[str, float | None]:
    """Return the peak TFLOP/s of a card by CUDA's device name; empty if unknown."""
    card = of(device)
    return card.tflops if card else {}


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Z0-9]+", text.upper()))


@cache
def _table() -> tuple[tuple[frozenset[str], frozenset[str], GpuType], ...]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = [{name: float(cell) if cell else None for name, cell in row.items() if name in NUMBERS} for row in rows]
    return tuple(
        (
            _words(row["words"]),
            _words(row["without"]),
            GpuType(row["name"], {kind: number.pop(kind) for kind in KINDS}, **number),  # type: ignore[arg-type]  # a floor is never empty
        )
        for row, number in zip(rows, numbers, strict=True)
    )

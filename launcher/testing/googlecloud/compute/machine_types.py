"""Machine and accelerator types by zone, from the table machine_types.csv."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

ATTACHED = {"nvidia-tesla-t4": 4, "nvidia-tesla-v100": 8, "nvidia-tesla-p4": 4}
"""Accelerators that can be attached to N1 machines, and the maximum number per VM."""
AI_ZONES = {"us-central1": ("ai1a",), "us-south1": ("ai1b",), "europe-west4": ("ai1a",)}
"""AI zones by region (https://docs.cloud.google.com/compute/docs/regions-zones/ai-zones).

Here each has the machine types of its parent zone, whose letter it ends with.
"""
UNUSUAL = {"us-central1": "abcf", "us-east1": "bcd", "europe-west1": "bcd"}
"""Regions whose zones are not a, b and c."""


class Shape(NamedTuple):
    """A machine type with its `local_ssds` (375 GiB each). `gpus` is 0 if none are built in."""

    name: str
    accelerator: str
    gpus: int
    vcpus: int
    memory_gb: float
    local_ssds: int
    zones: frozenset[str]
    regions: frozenset[str]

    def within(self, zone: str) -> bool:
        """Return whether the zone has it."""
        if self.zones:
            return zone in self.zones or f"{zone.rpartition('-')[0]}-{zone[-1]}" in self.zones
        return "*" in self.regions or zone.rpartition("-")[0] in self.regions


def shape(name: str, zone: str) -> Shape | None:
    """Return a machine type, if the zone has it."""
    machine = shapes().get(name)
    return machine if machine and machine.within(zone) else None


@cache
def regions() -> tuple[str, ...]:
    """Return all regions that have GPUs."""
    named = {zone.rpartition("-")[0] for machine in shapes().values() for zone in machine.zones}
    return tuple(sorted(named.union(*(machine.regions for machine in shapes().values())) - {"*"}))


def zones(region: str) -> tuple[str, ...]:
    """Return the zones of a region. Empty if the region does not exist."""
    if region not in regions():
        return ()
    return tuple(f"{region}-{zone}" for zone in (*UNUSUAL.get(region, "abc"), *AI_ZONES.get(region, ())))


def is_zone(name: str) -> bool:
    """Return whether a zone exists."""
    return name in zones(name.rpartition("-")[0])


@cache
def shapes() -> dict[str, Shape]:
    """Return all machine types by name."""
    lines = Path(__file__).with_name("machine_types.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {
        row["machine"]: Shape(
            name=row["machine"],
            accelerator=row["accelerator"],
            gpus=int(row["gpus"]),
            vcpus=int(row["vcpus"]),
            memory_gb=float(row["memory_gb"]),
            local_ssds=int(row["local_ssds"]),
            zones=frozenset(row["zones"].split()),
            regions=frozenset(row["regions"].split()),
        )
        for row in rows
    }

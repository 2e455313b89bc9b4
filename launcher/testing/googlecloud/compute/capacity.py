"""Simulated stockouts and quotas, with Google's messages.

    cloud.compute.capacity.out("us-central1-*", "a3-*", available=("us-east4-a",))
    cloud.compute.capacity.out("us-central1-a", left=1)
    cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")

By default capacity and quota are unlimited. The messages and the shape of errorDetails are those of published answers
(github.com/kubernetes/k8s.io issue 9834, CCExtractor/sample-platform issue 901).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from launcher.testing.googlecloud.compute.api import Problem

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
        if self.zones:
            return zone in self.zones or f"{zone.rpartition('-')[0]}-{zone[-1]}" in self.zones
        return "*" in self.regions or zone.rpartition("-")[0] in self.regions


def shape(name: str, zone: str) -> Shape | None:
    machine = shapes().get(name)
    return machine if machine and machine.within(zone) else None


@cache
def regions() -> tuple[str, ...]:
    named = {zone.rpartition("-")[0] for machine in shapes().values() for zone in machine.zones}
    return tuple(sorted(named.union(*(machine.regions for machine in shapes().values())) - {"*"}))


def zones(region: str) -> tuple[str, ...]:
    """Return the zones of a region. Empty if the region does not exist."""
    if region not in regions():
        return ()
    return tuple(f"{region}-{zone}" for zone in (*UNUSUAL.get(region, "abc"), *AI_ZONES.get(region, ())))


def is_zone(name: str) -> bool:
    return name in zones(name.rpartition("-")[0])


@cache
def shapes() -> dict[str, Shape]:
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


STOCKOUT = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
LINK = {"description": "Troubleshooting documentation", "url": "https://cloud.google.com/compute/docs/resource-error"}
HELP = {"help": {"links": [LINK]}}


@dataclass(frozen=True)
class Demand:
    """The capacity that a VM requires."""

    zone: str
    machine: str
    model: str
    accelerator: str = ""
    gpus: int = 0

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]


@dataclass(frozen=True)
class Shortage:
    """A stockout in zones, of machine types (globs).

    `left` VMs are still available. With `after`, the insert's operation fails that many seconds after it began (None:
    by the cloud's pace).
    """

    zone: str = "*"
    machine: str = "*"
    available: tuple[str, ...] = ()
    left: int = 0
    after: float | None = None

    def affects(self, wanted: Demand) -> bool:
        return fnmatchcase(wanted.zone, self.zone) and fnmatchcase(wanted.machine, self.machine)

    def problem(self, project: str, wanted: Demand) -> Problem:
        attached = f"{wanted.accelerator}:{wanted.gpus}" if wanted.machine.startswith("n1-") and wanted.gpus else ""
        known = {"attachment": attached, "vmType": wanted.machine, "zone": wanted.zone}
        info = {
            "domain": "compute.googleapis.com",
            "metadatas": {**known, "zonesAvailable": ",".join(self.available)},
            "reason": "resource_availability",
        }
        text = f"The zone 'projects/{project}/zones/{wanted.zone}' does not have enough resources available to fulfill "
        text += "the request.  '(resource type:compute)'."
        return Problem(STOCKOUT, text, 503, (HELP, {"errorInfo": info}))


class Capacity:
    """All stockouts."""

    def __init__(self) -> None:
        self.shortages: list[Shortage] = []

    def out(self, zone: str = "*", machine: str = "*", **more: Any) -> None:
        """Add a stockout. `more` are further fields of Shortage."""
        self.shortages.append(Shortage(zone, machine, **more))

    def back(self) -> None:
        self.shortages.clear()

    def meets(self, wanted: Demand) -> Shortage | None:
        """Return the stockout that applies to a VM, or None."""
        return next((shortage for shortage in self.shortages if shortage.affects(wanted)), None)


PLENTY = 1000.0
NAMED = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-tesla-v100": "NVIDIA_V100_GPUS",
    "nvidia-tesla-p4": "NVIDIA_P4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
}
"""Metrics in the enum Quota.Metric of google-cloud-compute 1.56.0.

On demand, newer GPUs share GPUS_PER_GPU_FAMILY, which regions.get doesn't show.
"""
PREEMPTIBLE = ("SPOT", "FLEX_START")
"""Models that consume preemptible quota (Google Cloud blog, "Introducing Flex-start VMs", 2025-09-25)."""
PREEMPTIBLE_ONLY = {"nvidia-h100-80gb": "PREEMPTIBLE_NVIDIA_H100_GPUS"}
EVERYWHERE = "GPUS_ALL_REGIONS"
PER_FAMILY = "GPUS_PER_GPU_FAMILY"


def metric(wanted: Demand) -> str:
    """Return the quota that a VM's GPUs consume in its region. Empty: none."""
    if not wanted.gpus:
        return ""
    named = NAMED.get(wanted.accelerator)
    if wanted.model in PREEMPTIBLE:
        return f"PREEMPTIBLE_{named}" if named else PREEMPTIBLE_ONLY.get(wanted.accelerator, "")
    return named if named and wanted.model == "STANDARD" else PER_FAMILY


@dataclass
class Quotas:
    """Limits by (region, metric). The region of GPUS_ALL_REGIONS is empty.

    Metrics in `late` are refused by the operation instead of the request.
    """

    limits: dict[tuple[str, str], float] = field(default_factory=dict)
    late: bool = False

    def limit(self, name: str, limit: float, region: str = "", *, late: bool = False) -> None:
        self.limits["" if name == EVERYWHERE else region, name] = limit
        self.late = late

    def exceeded(self, wanted: Iterable[Demand], used: Iterable[Demand]) -> Problem | None:
        """Return the problem if new VMs exceed a quota, given the existing VMs. None: they fit."""
        new, existing = list(wanted), list(used)
        for name in dict.fromkeys([*filter(None, map(metric, new)), EVERYWHERE]):
            region = "" if name == EVERYWHERE else new[0].region
            most = self.limits.get((region, name), PLENTY)
            if self.usage(new, region, name) and self.usage([*existing, *new], region, name) > most:
                known = {"metricName": f"compute.googleapis.com/{name.lower()}", "limit": most}
                known |= {"limitName": f"{name.replace('_', '-')}-per-project" + ("-region" if region else "")}
                info = {"quotaInfo": {**known, "dimensions": {"region": region or "global"}}}
                where = f"in region {region}." if region else "globally."
                return Problem("QUOTA_EXCEEDED", f"Quota '{name}' exceeded.  Limit: {most:.1f} {where}", 403, (info,))
        return None

    def usage(self, vms: Iterable[Demand], region: str, name: str) -> float:
        if name == EVERYWHERE:
            return float(sum(vm.gpus for vm in vms))
        return float(sum(vm.gpus for vm in vms if vm.region == region and metric(vm) == name))

    def shown(self, used: Iterable[Demand], region: str) -> list[dict[str, Any]]:
        """Return regions.get's quotas[], or with an empty region projects.get's."""
        vms = list(used)
        classic = [*NAMED.values(), *(f"PREEMPTIBLE_{name}" for name in NAMED.values()), *PREEMPTIBLE_ONLY.values()]
        names = classic if region else [EVERYWHERE]
        return [
            {"metric": n, "limit": self.limits.get((region, n), PLENTY), "usage": self.usage(vms, region, n)}
            for n in names
        ]

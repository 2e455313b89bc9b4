"""Find launch's VMs and disks that are billed but no longer needed, from Compute Engine's data alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from launcher.jobs.job import RUN_LABEL
from launcher.jobs.vm import DOWN, VmInstance, last_url_part, seconds

LATE_SECONDS: Final = 600.0
"""Grace period in seconds.

After a lease ends, the watchdog (every 30 s) must have stopped the VM by then. After a training job ends, its VM must
have deleted itself by then.
"""
FORGOTTEN_SECONDS: Final = 7 * 86400.0
"""A workstation VM that is stopped for longer counts as forgotten. Its disk is still billed."""


class Disk(Struct, frozen=True, kw_only=True):
    """A persistent disk. Times are Unix seconds by Google's clock."""

    name: str
    zone: str
    kind: str
    """pd-balanced, …"""
    size_gb: int
    created: float
    users: tuple[str, ...] = ()
    """The names of the VMs that it is attached to."""
    labels: Mapping[str, str] = {}
    image: str = ""
    """The image that the disk was created from."""

    @classmethod
    def parse(cls, disk: Mapping[str, Any]) -> Disk:
        """Return a Disk in canonical proto3 JSON as a struct."""
        return cls(
            name=disk.get("name", ""),
            zone=last_url_part(disk.get("zone", "")),
            kind=last_url_part(disk.get("type", "")),
            size_gb=int(disk.get("sizeGb", 0)),
            created=seconds(disk.get("creationTimestamp")) or 0.0,
            users=tuple(map(last_url_part, disk.get("users", ()))),
            labels=dict(disk.get("labels", {})),
            image=last_url_part(disk.get("sourceImage", "")),
        )

    @property
    def region(self) -> str:
        """Return the region of the zone: us-central1 for us-central1-a."""
        return self.zone.rpartition("-")[0]


def orphan_reason(machine: VmInstance, now: float, ended: float | None) -> str | None:
    """Return why a VM is an orphan, or None. `ended` is the end of its training according to the run folder."""
    if machine.trains:
        return of_training(machine, now, ended)
    if machine.status in DOWN:
        stopped = now - (machine.stopped or machine.created)
        return f"stopped for {stopped / 86400:.0f} days" if stopped > FORGOTTEN_SECONDS else None
    until = machine.lease_until
    if machine.status == "RUNNING" and until is not None and now > until + LATE_SECONDS:
        return "still running after its lease ended: its watchdog failed"
    return None


def of_training(machine: VmInstance, now: float, ended: float | None) -> str | None:
    """Return why a training VM is an orphan, or None. Training VMs delete themselves when they end."""
    if ended is not None and (machine.status in DOWN or now > ended + LATE_SECONDS):
        return "its run has ended, but the VM still exists"
    if ended is None and machine.status in DOWN:
        return "stopped, but its run folder records no end"
    return None


def without_vm(disks: Iterable[Disk], machines: Iterable[VmInstance]) -> tuple[Disk, ...]:
    """Return launch's disks that are not attached and are not disks (VM, VM-1, …) of a VM that is being created."""
    there = {(machine.zone, machine.name) for machine in machines}
    ours = [disk for disk in disks if disk.labels.get(RUN_LABEL)]
    return tuple(
        disk
        for disk in ours
        if not disk.users and not {(disk.zone, disk.name), (disk.zone, disk.name.rpartition("-")[0])} & there
    )

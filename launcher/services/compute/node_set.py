"""Find the VMs of one job: their metadata lists the names of all its nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from launcher.jobs.job import Job
from launcher.jobs.vm import VmInstance

BULK_INSERT_SECONDS: Final = 60.0
"""The creation times of one bulkInsert's VMs differ by at most this."""


def nodes_of(machine: VmInstance) -> tuple[str, ...]:
    """Return the names of all VMs of a VM's job, itself included, node 0 first."""
    found = machine.parameters.get("nodes")
    return tuple(map(str, found)) if isinstance(found, list) and found else (machine.name,)


def is_head(machine: VmInstance) -> bool:
    """Return whether the VM is node 0, which identifies the job."""
    return nodes_of(machine)[0] == machine.name


def vms_of_job(machine: VmInstance, fleet: Sequence[VmInstance]) -> tuple[VmInstance, ...]:
    """Return an existing VM and those of `fleet` that belong to the same job."""
    names = nodes_of(machine)
    others = (one for one in fleet if one.name in names and one.zone == machine.zone and one.run == machine.run)
    return (machine, *(one for one in others if one.id != machine.id and one.trains))


def remaining_vms(job: Job, fleet: Sequence[VmInstance]) -> tuple[VmInstance, ...]:
    """Return the VMs of `fleet` that an ended job left behind.

    VMs of another attempt in the same zone are excluded: they have another node 0, or were created later.
    """
    same_run = [one for one in fleet if one.zone == job.zone and one.run == job.run and one.trains]
    if any(is_head(one) and one.id != job.id for one in same_run):
        return tuple(one for one in same_run if one.id == job.id)
    return tuple(one for one in same_run if one.id == job.id or abs(one.created - job.created) <= BULK_INSERT_SECONDS)

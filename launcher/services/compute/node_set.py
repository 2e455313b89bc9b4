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
    nodes = machine.parameters.get("nodes")
    return tuple(map(str, nodes)) if isinstance(nodes, list) and nodes else (machine.name,)


def is_head(machine: VmInstance) -> bool:
    """Return whether the VM is node 0, which identifies the job."""
    return nodes_of(machine)[0] == machine.name


def vms_of_job(machine: VmInstance, fleet: Sequence[VmInstance]) -> tuple[VmInstance, ...]:
    """Return an existing VM and those of `fleet` that belong to the same job."""
    names = nodes_of(machine)
    others = (vm for vm in fleet if vm.name in names and vm.zone == machine.zone and vm.run == machine.run)
    return (machine, *(vm for vm in others if vm.id != machine.id and vm.trains))


def remaining_vms(job: Job, fleet: Sequence[VmInstance]) -> tuple[VmInstance, ...]:
    """Return the VMs of `fleet` that an ended job left behind.

    VMs of another attempt in the same zone are excluded: they have another node 0, or were created later.
    """
    same_run = [vm for vm in fleet if vm.zone == job.zone and vm.run == job.run and vm.trains]
    if any(is_head(vm) and vm.id != job.id for vm in same_run):
        return tuple(vm for vm in same_run if vm.id == job.id)
    return tuple(vm for vm in same_run if vm.id == job.id or abs(vm.created - job.created) <= BULK_INSERT_SECONDS)

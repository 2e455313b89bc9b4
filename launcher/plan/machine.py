"""Choose the machine type of a spec."""

from __future__ import annotations

from launcher.catalog import Catalog, MachineType
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Gpus, Target
from launcher.plan.placement import SERVICE
from launcher.spec.models import JobSpec


def choose(spec: JobSpec, catalog: Catalog, target: Target) -> Chosen:
    """Return the machine type for the spec's GPU and count.

    Raises:
        PlanRefused: the service has no such machine (`launch local` accepts any number of GPUs).
    """
    wanted = spec.machine
    try:
        machine = catalog.find(wanted.type, wanted.gpus, wanted.accelerator, SERVICE[target])
    except PlanRefused:
        if target != "local":
            raise
        return rehearsed(spec, catalog)
    return Chosen(machine=machine, gpu=catalog.gpu(machine.gpu), gpus=machine.gpus)


def rehearsed(spec: JobSpec, catalog: Catalog) -> Chosen:
    """Return the GPU alone: a rehearsal runs any number of processes. Raises PlanRefused: unknown GPU."""
    kind = spec.machine.accelerator or spec.machine.type
    gpu = catalog.gpu(kind if kind.lower() in catalog.gpus else catalog.find(kind, None, None, "compute").gpu)
    return Chosen(machine=None, gpu=gpu, gpus=spec.machine.gpus or 1)


def has_many_networks(machine: MachineType) -> bool:
    """Return whether the machine's fast network has several interfaces, each in its own VPC network."""
    return (machine.nics or 1) > 1


def figures(chosen: Chosen, nodes: int) -> Gpus:
    """Return the machine for display."""
    machine = chosen.machine
    return Gpus(
        machine_type=machine.name if machine else "no matching machine type",
        gpu=chosen.gpu.title,
        gpus=chosen.gpus,
        gpu_memory_gb=chosen.gpu.memory_gb,
        vcpus=machine.vcpus if machine else None,
        memory_gb=machine.memory_gb if machine else None,
        nodes=nodes,
    )

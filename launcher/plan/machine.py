"""Which machine a spec means."""

from __future__ import annotations

from launcher.catalog import Catalog, MachineType
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Gpus, Target
from launcher.plan.placement import SERVICE
from launcher.spec.models import JobSpec


def choose(spec: JobSpec, catalog: Catalog, target: Target) -> Chosen:
    """The machine type for the spec's GPU and count.

    Raises:
        PlanRefused: no such machine on this service (`launch local` takes any number of GPUs).
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
    """A rehearsal runs any number of processes; only the kind of GPU must exist."""
    kind = spec.machine.accelerator or spec.machine.type
    gpu = catalog.gpu(kind if kind.lower() in catalog.gpus else catalog.find(kind, None, None, "compute").gpu)
    return Chosen(machine=None, gpu=gpu, gpus=spec.machine.gpus or 1)


def has_many_networks(machine: MachineType) -> bool:
    """Whether its fast network takes several interfaces, each in a network of its own."""
    return (machine.nics or 1) > 1


def figures(chosen: Chosen, nodes: int) -> Gpus:
    """The machine in figures for people."""
    machine = chosen.machine
    return Gpus(
        machine_type=machine.name if machine else "a machine that Google doesn't sell",
        gpu=chosen.gpu.title,
        gpus=chosen.gpus,
        gpu_memory_gb=chosen.gpu.memory_gb,
        vcpus=machine.vcpus if machine else None,
        memory_gb=machine.memory_gb if machine else None,
        nodes=nodes,
    )

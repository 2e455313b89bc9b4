"""Choose the machine type of a spec."""

from __future__ import annotations

from launcher.catalog import Catalog, MachineType
from launcher.errors import PlanRefused
from launcher.plan.model import Chosen, Gpus, Target
from launcher.plan.placement import SERVICE
from launcher.spec.models import JobSpec


def choose(spec: JobSpec, catalog: Catalog, target: Target) -> tuple[Chosen, ...]:
    """Return the machine for each of the spec's types, with the same number of GPUs; a rehearsal has the first alone.

    Raises:
        PlanRefused: the service has no such machine (`launch local` accepts any number of GPUs), or the types cannot
            be combined.
    """
    machines = tuple(machine_of_type(spec, catalog, target, name) for name in spec.machine.types)
    if target == "local" or len(machines) == 1:
        return machines[:1]
    if target == "vm":
        raise PlanRefused(
            f"machine.type: VMs take one type, and the spec lists {', '.join(spec.machine.types)}",
            f"Name one: --type {spec.machine.types[0]}; or use Vertex AI: launch vertex SPEC",
            field="machine.type",
        )
    counts = {name: chosen.gpus for name, chosen in zip(spec.machine.types, machines, strict=True)}
    if len({*counts.values()}) > 1:
        shown = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise PlanRefused(
            f"machine.type: the types have different numbers of GPUs: {shown}",
            "Set the number, so that each type computes the same run: --gpus N",
            field="machine.type",
        )
    names = [chosen.name for chosen in machines]
    if len({*names}) < len(names):  # a run's attempts are told apart by their machine type
        twice = next(name for name in names if names.count(name) > 1)
        same = [name for name, chosen in zip(spec.machine.types, machines, strict=True) if chosen.name == twice]
        raise PlanRefused(
            f"machine.type: {' and '.join(same)} have the same machine type, {twice}", "Keep one.", field="machine.type"
        )
    return machines


def machine_of_type(spec: JobSpec, catalog: Catalog, target: Target, name: str) -> Chosen:
    """Return the machine for one type. Raises PlanRefused: the service has none, or the GPU is unknown."""
    wanted = spec.machine
    try:
        machine = catalog.find(name, wanted.gpus, wanted.accelerator, SERVICE[target])
    except PlanRefused:
        if target != "local":
            raise
        # A rehearsal runs any number of processes.
        kind = wanted.accelerator or name
        gpu = catalog.gpu(kind if kind.lower() in catalog.gpus else catalog.find(kind, None, None, "compute").gpu)
        return Chosen(machine=None, gpu=gpu, gpus=wanted.gpus or 1)
    return Chosen(machine=machine, gpu=catalog.gpu(machine.gpu), gpus=machine.gpus)


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

"""The warnings of a plan: what will work, but not as one may think."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.catalog import Catalog
from launcher.plan import names
from launcher.plan.compute import has_local_ssd
from launcher.plan.model import Attempt, Chosen, Context
from launcher.plan.places import SERVICE
from launcher.spec.models import JobSpec


def warnings(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, attempts: tuple[Attempt, ...]
) -> tuple[str, ...]:
    """Each a sentence or two, most important first."""
    if context.target == "local":
        return ()
    found = [
        *of_machine(catalog, context, chosen, attempts),
        *of_target(spec, context, chosen),
        *of_price(spec, attempts),
    ]
    return tuple(dict.fromkeys(found))


def of_machine(catalog: Catalog, context: Context, chosen: Chosen, attempts: tuple[Attempt, ...]) -> Iterator[str]:
    """What the catalog notes about the machine, and about how it is asked for."""
    machine = chosen.machine
    if machine is None:
        return
    for model in dict.fromkeys(attempt.provisioning for attempt in attempts):
        yield from catalog.warnings(machine, SERVICE[context.target], model)
    if context.target == "vm" and (machine.nics or 1) > 1:
        yield (
            f"{machine.name} has {machine.nics} network interfaces; this VM gets one. That is enough for one machine: "
            "its GPUs talk over NVLink."
        )


def of_target(spec: JobSpec, context: Context, chosen: Chosen) -> Iterator[str]:
    """What the service does with this spec."""
    if context.training and spec.output is None:
        bucket = names.default_output(context.project).split("/")[2]
        yield f"output is left out: the run writes to gs://{bucket}/runs, a bucket that must exist."
    if context.target == "vertex" and spec.zones:
        yield "zones narrow the regions only: Vertex AI chooses the zone itself."
    if context.target == "vertex" and spec.machine.local_ssds:
        yield "machine.local_ssds has no effect on Vertex AI, which has no field for it."
    stops = (spec.vm.on_stop or ("delete" if context.training else "stop")) == "stop"
    if context.target == "vm" and stops and chosen.machine and has_local_ssd(spec, chosen.machine):
        yield "a stop loses what lies on the local SSDs (/mnt/localssd); the boot disk stays, and is billed."


def of_price(spec: JobSpec, attempts: tuple[Attempt, ...]) -> Iterator[str]:
    """What the sum leaves out."""
    if any(attempt.usd_per_hour is None for attempt in attempts):
        yield "some prices are unknown, so the most that this run can cost is unknown too."
    if spec.vertex.reduction_server:
        servers = spec.vertex.reduction_server
        yield f"the price leaves out the {servers.replicas} reduction servers ({servers.machine_type})."

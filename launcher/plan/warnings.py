"""The warnings of a plan: what will work, but not as one may think."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.catalog import Catalog
from launcher.plan import names
from launcher.plan.machine import has_many_networks
from launcher.plan.model import Attempt, Chosen, Context
from launcher.plan.placement import SERVICE, is_ai_zone
from launcher.plan.vm_metadata import on_stop
from launcher.plan.vm_request import has_local_ssd
from launcher.plan.waiting import flex_start_vm
from launcher.spec.models import JobSpec, Run
from launcher.spec.services import Vertex
from launcher.text import parse_duration

MUCH_CODE = 100_000_000
"""Bytes of code above which it probably includes data or weights. Each push sends all of it again."""
SERVICE_NAMES = {"vertex": "Vertex AI", "vm": "Compute Engine", "local": "this machine"}


def warnings(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, attempts: tuple[Attempt, ...]
) -> tuple[str, ...]:
    """Each a sentence or two, most important first."""
    if context.target == "local":
        return tuple(of_code(context))
    found = [
        *of_code(context),
        *of_machine(spec, catalog, context, chosen, attempts),
        *of_target(spec, context, chosen),
        *of_price(spec, attempts),
    ]
    return tuple(dict.fromkeys(found))


def of_code(context: Context) -> Iterator[str]:
    """What the image doesn't get, and what it has to have."""
    if context.secret_files:
        shown = ", ".join(context.secret_files[:5]) + (" …" if len(context.secret_files) > 5 else "")
        yield f"left out of the image, for they look like secrets: {shown}. A job gets its secrets by `secrets`."
    if context.code.size > MUCH_CODE:
        yield (
            f"the image contains {context.code.size / 1e6:,.0f} MB of code in {context.code.files:,} files. Name what "
            "the job doesn't need in .dockerignore; data belongs in the bucket."
        )
    if context.ignored:
        shown = ", ".join(context.ignored[:5])
        more = f" and {len(context.ignored) - 5} more" if len(context.ignored) > 5 else ""
        yield (
            f"named, but not in the image: {shown}{more}. The job can't read them: put data into a bucket, or change "
            ".gitignore or .dockerignore."
        )
    if context.outside:
        shown = ", ".join(context.outside[:5]) + (" …" if len(context.outside) > 5 else "")
        yield (
            f"outside the code: {shown}. Relative paths begin in /workspace, and the job may not write above it. Use a "
            "path inside, or start in a subfolder: run.command: [sh, -c, cd FOLDER && exec python SCRIPT]"
        )
    if context.grown:
        yield f"the code has grown: {context.grown}. Name output in .gitignore or .dockerignore."
    for function in context.elsewhere:
        yield f"{function} is no file of the code: a package of the image has to bring it"
    yield from context.unread
    yield from context.code_warnings


def of_machine(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, attempts: tuple[Attempt, ...]
) -> Iterator[str]:
    """What the catalog notes about the machine, and about how it is asked for."""
    machine = chosen.machine
    if machine is None:
        return
    for model in dict.fromkeys(attempt.provisioning for attempt in attempts):
        yield from catalog.warnings(machine, SERVICE[context.target], model)
    if context.target == "vm" and has_many_networks(machine):
        yield (f"{machine.name} has {machine.nics} network interfaces; {one_interface(spec.machine.nodes)}")


def one_interface(nodes: int) -> str:
    """What it means that a VM gets one network interface of several."""
    if nodes == 1:
        return "this VM gets one. That is enough for one machine: its GPUs talk over NVLink."
    return "these VMs get one each, so between them NCCL uses plain TCP. On Vertex AI it has the fast network."


def of_target(spec: JobSpec, context: Context, chosen: Chosen) -> Iterator[str]:
    """What the service does with this spec."""
    if context.training and spec.output is None:
        bucket = names.default_output(context.project).split("/")[2]
        yield f"output is left out: the run writes to gs://{bucket}/runs, a bucket that must exist."
    if context.target == "vertex" and spec.zones:
        yield "zones narrow the regions only: Vertex AI chooses the zone itself."
    without_effect = [field for field, value in elsewhere(spec, context) if value]
    if without_effect:
        yield f"{', '.join(without_effect)}: without effect on {SERVICE_NAMES[context.target]}."
    if context.target == "vm":
        yield from of_vm(spec, context, chosen)


def elsewhere(spec: JobSpec, context: Context) -> tuple[tuple[str, object], ...]:
    """Fields that the other service has, with what the spec says there."""
    identity, vertex, vm = spec.identity, spec.vertex, spec.vm
    if context.target == "vertex":
        return (
            ("machine.local_ssds", spec.machine.local_ssds),
            ("identity.subnetwork", identity.subnetwork),
            ("vm.image_family", vm.image_family),
            ("vm.image", vm.image),
            ("vm.external_ip", vm.external_ip),
            ("vm.on_stop", vm.on_stop),
            ("vm.lease", vm.lease),
            ("vm.idle_stop", vm.idle_stop),
        )
    return (
        ("identity.reserved_ip_ranges", identity.reserved_ip_ranges),
        ("identity.psc", identity.psc),
        ("vertex", vertex != Vertex()),
    )


def of_vm(spec: JobSpec, context: Context, chosen: Chosen) -> Iterator[str]:
    """What a VM does at its end, and how long it waits."""
    machine = chosen.machine
    if not context.training and (spec.run != Run() or spec.output or spec.secrets):
        yield "this is a VM to work on: the spec's job isn't started. With --run it is."
    if context.training and (spec.vm.lease or spec.vm.idle_stop):
        yield "vm.lease and vm.idle_stop are for a VM to work on: one that trains goes with its job."
    stops = on_stop(spec, training=context.training) == "stop"
    if stops and machine and has_local_ssd(spec, machine):
        yield "a stop loses what lies on the local SSDs (/mnt/localssd); the boot disk stays, and is billed."
    if machine and machine.local_ssd_auto and spec.machine.local_ssds:
        yield f"machine.local_ssds: {machine.name} brings its own; the number has no effect."
    if unlisted := [zone for zone in spec.zones or () if is_ai_zone(zone)]:
        yield f"{', '.join(unlisted)}: whether AI zones have {spec.machine.type} is not in launch's tables."
    wait = parse_duration(spec.limits.wait) if spec.limits.wait else None
    if wait and (taken := flex_start_vm(wait)) != wait and "flex-start" in (spec.provisioning or ()):
        yield f"limits.wait: Compute Engine takes 90 s to 2 h for flex-start; the request says {taken} s."


def of_price(spec: JobSpec, attempts: tuple[Attempt, ...]) -> Iterator[str]:
    """What the sum leaves out."""
    if any(attempt.usd_ceiling is None for attempt in attempts):
        yield "some prices are unknown, so the most that this run can cost is unknown too."
    if spec.vertex.reduction_server:
        servers = spec.vertex.reduction_server
        yield f"the price leaves out the {servers.replicas} reduction servers ({servers.machine_type})."
        yield "the reduction servers have work only if the image has NCCL's plugin google-reduction-server."

"""The warnings of a plan: settings that work, but may not do what the user expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.catalog import Catalog
from launcher.plan import names
from launcher.plan.estimate import precision
from launcher.plan.memory.fit import fit_of
from launcher.plan.memory.need import GB
from launcher.plan.model import Attempt, Chosen, Context
from launcher.plan.placement import SERVICE, clamp_flex_start_vm_wait, has_many_networks, is_ai_zone
from launcher.plan.recipe import uses_base_torch
from launcher.plan.validate import loggers_of
from launcher.plan.vm_request import has_local_ssd, on_stop
from launcher.spec.checks import config_of
from launcher.spec.models import JobSpec, Run, Vertex
from launcher.text import parse_duration, plural, size_text

LARGE_CODE = 100_000_000
"""Bytes above which code probably includes data or weights. Each push sends all of it again."""
PROCESS_BYTES = 2 * GB
"""Host memory of a process of the trainer, with PyTorch's and CUDA's libraries. Assumed."""
PINNED_SHARE = 9 / 8
"""Pinned memory of a checkpoint's copies, as a multiple of their bytes: see HostCopies in partition.py."""
SERVICE_NAMES = {"vertex": "Vertex AI", "vm": "Compute Engine", "local": "this machine"}


def warnings(
    spec: JobSpec, catalog: Catalog, context: Context, machines: Sequence[Chosen], attempts: tuple[Attempt, ...]
) -> tuple[str, ...]:
    """Return all warnings, the most important first. Each has one or two sentences."""
    if context.target == "local":
        lines = [*about_code(spec, catalog, context), *about_mounts(spec, context), *about_loggers(spec, context)]
        return tuple(lines)
    lines = [
        *about_code(spec, catalog, context),
        *about_mounts(spec, context),
        *about_types(spec, machines),
        *(text for chosen in machines for text in about_machine(spec, catalog, context, chosen, attempts)),
        *about_target(spec, context, machines[0]),
        *about_loggers(spec, context),
        *about_price(spec, attempts),
    ]
    return tuple(dict.fromkeys(lines))


def about_code(spec: JobSpec, catalog: Catalog, context: Context) -> Iterator[str]:
    yield from context.code_warnings
    if context.code.size > LARGE_CODE:
        yield (
            f"the image contains {context.code.size / 1e6:,.0f} MB of code in {plural(context.code.files, 'file')}. "
            "Exclude unneeded files in .dockerignore, and put data in a bucket."
        )
    torch = next((requirement for requirement in context.packages.named if requirement.name == "torch"), None)
    if torch and uses_base_torch(spec, catalog):
        yield f"{torch.where}: {torch.text}: the base's own PyTorch is used; with another release the build fails."


def about_mounts(spec: JobSpec, context: Context) -> Iterator[str]:
    """Yield where mounts have no effect."""
    if not spec.mounts:
        return
    if context.target == "local":
        folders = ", ".join(mount.folder for mount in spec.mounts)
        yield f"mounts: no effect on this machine; the folders must exist here: {folders}"
    elif not context.training:
        yield "mounts: no effect on a VM to work on; with --run, the job's container has them."
    elif context.target == "vertex" and any(mount.read_only for mount in spec.mounts):
        yield "mounts: read_only has no effect on Vertex AI; the account's permissions decide."


def about_types(spec: JobSpec, machines: Sequence[Chosen]) -> Iterator[str]:
    """Yield how the machine types differ in what they compute."""
    if spec.run.is_builtin and len(machines) > 1:
        config = config_of(spec.run)
        kinds = {chosen.gpu.name: precision(config, chosen.gpu) for chosen in machines}
        if len({*kinds.values()}) > 1:
            shown = ", ".join(f"{kind} on {name}" for name, kind in kinds.items())
            yield f"the automatic precision differs: {shown}. run.config.precision sets one for all"


def about_machine(
    spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, attempts: tuple[Attempt, ...]
) -> Iterator[str]:
    """Yield the catalog's notes on the machine and its provisioning models."""
    machine = chosen.machine
    if machine is None:
        return
    attempts = tuple(attempt for attempt in attempts if attempt.machine_type == machine.name)
    for model in dict.fromkeys(attempt.provisioning for attempt in attempts):
        yield from catalog.warnings(machine, SERVICE[context.target], model)
    doubts = {zone: catalog.doubt(machine, zone) for attempt in attempts if (zone := attempt.zone)}
    for doubt in dict.fromkeys(filter(None, doubts.values())):
        zones = ", ".join(zone for zone in doubts if doubts[zone] == doubt)
        yield f"{zones} may lack {machine.name} ({doubt}){': tried last' if spec.regions == 'any' else ''}."
    memory = fit_of(spec, chosen)
    if memory and machine.memory_gb:
        state = int(4 * memory.model.parameters * (1 + memory.setup.numbers) * PINNED_SHARE / spec.machine.nodes)
        if state + chosen.gpus * PROCESS_BYTES > machine.memory_gb * GB:
            yield (
                f"host memory: a checkpoint's copy takes about {size_text(state)} on each node, besides its processes; "
                f"{machine.name} has {machine.memory_gb:g} GB. The job may be killed at its first checkpoint."
            )
    if context.target == "vm" and has_many_networks(machine):
        effect = "this VM gets one. One is enough for a single machine, whose GPUs use NVLink."
        if spec.machine.nodes > 1:
            effect = (
                "these VMs get one each, so NCCL uses plain TCP between them. On Vertex AI it uses the fast network."
            )
        yield f"{machine.name} has {machine.nics} network interfaces; {effect}"


def about_target(spec: JobSpec, context: Context, chosen: Chosen) -> Iterator[str]:
    if context.training and spec.output is None:
        bucket = names.default_output(context.project).split("/")[2]
        yield f"output is not set: the run writes to gs://{bucket}/runs, a bucket that must exist."
    if context.target == "vertex" and spec.zones:
        yield "zones only restrict the regions that are tried: Vertex AI chooses the zone itself."
    without_effect = [field for field, value in settings_of_other_service(spec, context) if value]
    if without_effect:
        yield f"{', '.join(without_effect)}: no effect on {SERVICE_NAMES[context.target]}."
    if context.target == "vm":
        yield from about_vm(spec, context, chosen)


def settings_of_other_service(spec: JobSpec, context: Context) -> tuple[tuple[str, object], ...]:
    """Return the settings that only the other service has, with their values in the spec."""
    identity, vertex, vm = spec.identity, spec.vertex, spec.vm
    if context.target == "vertex":
        return (
            ("machine.local_ssds", spec.machine.local_ssds),
            ("identity.subnetwork", identity.subnetwork),
            ("vm.image_family", vm.image_family),
            ("vm.image", vm.image),
            ("vm.external_ip", vm.external_ip),
            ("vm.dense_reservation", vm.dense_reservation),
            ("vm.on_stop", vm.on_stop),
            ("vm.lease", vm.lease),
            ("vm.idle_stop", vm.idle_stop),
        )
    return (
        ("identity.reserved_ip_ranges", identity.reserved_ip_ranges),
        ("identity.psc", identity.psc),
        ("vertex", vertex != Vertex()),
    )


def about_vm(spec: JobSpec, context: Context, chosen: Chosen) -> Iterator[str]:
    machine = chosen.machine
    if not context.training and (spec.run != Run() or spec.output or spec.secrets or spec.notify):
        yield "this creates a VM to work on, without starting the spec's program. Use --run to train."
    if context.training and (spec.vm.lease or spec.vm.idle_stop):
        yield "vm.lease and vm.idle_stop have no effect with --run: the VM deletes itself when its job ends."
    stops = on_stop(spec, training=context.training) == "stop"
    if stops and machine and has_local_ssd(spec, machine):
        yield "stopping the VM erases its local SSDs (/mnt/localssd); the boot disk is kept, and billed."
    if machine and machine.local_ssd_auto and spec.machine.local_ssds:
        yield f"machine.local_ssds has no effect: {machine.name} includes its own."
    if unlisted := [zone for zone in spec.zones or () if is_ai_zone(zone)]:
        yield f"{', '.join(unlisted)}: it is not known whether AI zones have {spec.machine.types[0]}."
    wait = parse_duration(spec.limits.wait) if spec.limits.wait else None
    if wait and (clamped := clamp_flex_start_vm_wait(wait)) != wait and "flex-start" in (spec.provisioning or ()):
        yield f"limits.wait: Compute Engine accepts 90 s to 2 h for flex-start; the request has {clamped} s."


def about_price(spec: JobSpec, attempts: tuple[Attempt, ...]) -> Iterator[str]:
    if any(attempt.usd_ceiling is None for attempt in attempts):
        yield "some prices are unknown, so the maximum cost of this run is unknown too."
    if spec.vertex.reduction_server:
        servers = spec.vertex.reduction_server
        yield f"the price excludes the {servers.replicas} reduction servers ({servers.machine_type})."
        yield "the reduction servers only work if the image has the NCCL plugin google-reduction-server."


def about_loggers(spec: JobSpec, context: Context) -> Iterator[str]:
    """Yield what a logger lacks to reach its server, as far as the spec says."""
    field, names = loggers_of(spec)
    names = names or ()
    variables = spec.env.keys() | spec.secrets.keys()
    if context.target == "local":
        if "vertex" in names:
            yield f"{field}: vertex has no effect on this machine; the TensorBoard events are in the run folder."
        return
    if "wandb" in names and "WANDB_API_KEY" not in variables and spec.env.get("WANDB_MODE") in (None, "online"):
        yield f"{field}: wandb needs WANDB_API_KEY; set secrets.WANDB_API_KEY, or env.WANDB_MODE: offline."
    if "mlflow" in names and "MLFLOW_TRACKING_URI" not in variables:
        yield f"{field}: mlflow needs env.MLFLOW_TRACKING_URI; without it, its rows stay on the job's machine."

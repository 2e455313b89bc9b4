"""What is refused before it costs anything: a well-formed spec that can't work on its target."""

from __future__ import annotations

import re

from launch_train.common.loopback import is_loopback
from launcher.catalog import Catalog, MachineType, Nccl
from launcher.errors import PlanRefused
from launcher.plan import iam_commands, names
from launcher.plan.model import Chosen, Container, Context, Place
from launcher.plan.placement import SERVICE
from launcher.plan.waiting import LEAST
from launcher.spec.models import JobSpec
from launcher.text import parse_duration

RUN_ID = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
PEERED_NETWORK = r"projects/[^/]+/global/networks/[^/]+"
MAX_ENV = 100
"""Environment variables of one container on Vertex AI (ContainerSpec.env, aiplatform_v1)."""
LOCAL_SSD_GIB = 375
VM_NAME = 63
"""Characters (Compute Engine, RFC 1035)."""
IDLE_LEAST = 300
"""Seconds."""


def of_spec(spec: JobSpec, context: Context) -> None:
    """What can't work on this target, whatever the machine."""
    if context.run_id and not re.fullmatch(RUN_ID, context.run_id):
        raise PlanRefused(
            f"--run-id {context.run_id!r} can't be taken",
            "It becomes a label and a VM's name: a-z, 0-9 and -, at most 63, starting with a letter.",
        )
    total = spec.limits.wait_total
    if total and parse_duration(total) < LEAST:
        raise PlanRefused(
            f"limits.wait_total: {total} is too short: an attempt waits at least {LEAST} s for machines",
            f"Set it to {LEAST}s or more: --set limits.wait_total=2h",
            field="limits.wait_total",
        )
    output = spec.output or "gs://"
    if context.target != "local" and context.training and not output.startswith("gs://"):
        raise PlanRefused(
            f"output is a local folder ({output}), which a machine in the cloud can't write to",
            "Set output (or --output) to gs://BUCKET/PATH.",
            field="output",
        )
    if context.target == "vm":
        of_vm(spec, context)
    elif context.target == "vertex":
        of_vertex(spec)
        of_secrets(spec, context)


def of_vm(spec: JobSpec, context: Context) -> None:
    """What Compute Engine refuses, or what nobody should do there."""
    if spec.name.endswith("-"):
        problem = f"name {spec.name!r} ends with -, which a VM's name can't"
        raise PlanRefused(problem, "Set another --name.", field="name")
    if spec.machine.nodes > 1:
        of_several_vms(spec, context)
    if spec.vm.idle_stop and parse_duration(spec.vm.idle_stop) < IDLE_LEAST:
        raise PlanRefused(
            f"vm.idle_stop: {spec.vm.idle_stop} would stop the VM while somebody thinks",
            f"Say {IDLE_LEAST // 60}m or more.",
            field="vm.idle_stop",
        )
    account = spec.identity.service_account or ""
    if account.endswith("-compute@developer.gserviceaccount.com") and not context.allow_default_account:
        of_default_account(spec, context)


def of_several_vms(spec: JobSpec, context: Context) -> None:
    """Nobody works on several at once, and some things can't be asked for several."""
    nodes = spec.machine.nodes
    if not context.training:
        raise PlanRefused(
            f"a VM to work on is one; the spec asks for {nodes} nodes",
            "With --run they train together. For one VM: --nodes 1.",
            field="machine.nodes",
        )
    if "flex-start" in (spec.provisioning or ()):
        raise PlanRefused(
            f"flex-start on Compute Engine is for one VM; the spec asks for {nodes} nodes, which come all or none",
            "Vertex AI has it for several: launch vertex. Or --provisioning spot.",
            field=f"provisioning.{(spec.provisioning or ()).index('flex-start')}",
        )
    longest = f"{context.run_id}-n{nodes - 1}" if context.run_id else ""
    if len(longest) > VM_NAME:
        raise PlanRefused(
            f"--run-id {context.run_id!r} is too long for {nodes} VMs: {longest} has {len(longest)} characters",
            f"A VM's name has at most {VM_NAME}.",
        )


def of_default_account(spec: JobSpec, context: Context) -> None:
    """Each program on such a VM could delete the project's other machines, and read all its buckets."""
    deletes = f"{spec.name}-" if context.training else None
    output = (spec.output or names.default_output(context.project)) if context.training else None
    raise PlanRefused(
        "the VM would run as the default compute service account, which can change the whole project",
        "Make an account that can do little, and name it in identity.service_account (or leave that out):\n"
        f"{iam_commands.account(context.project, output, deletes=deletes)}\n"
        "--allow-default-service-account takes the default one all the same.",
        field="identity.service_account",
    )


def of_vertex(spec: JobSpec) -> None:
    """What Vertex AI refuses."""
    if spec.vertex.persistent_resource and any(model.startswith("reservation:") for model in spec.provisioning or ()):
        raise PlanRefused(
            "vertex.persistent_resource has its machines already; a reservation can't be used beside it",
            "Leave one of them out.",
            field="vertex.persistent_resource",
        )
    network = spec.identity.network
    if network and not re.fullmatch(PEERED_NETWORK, network):
        raise PlanRefused(
            f"identity.network: {network!r} isn't a network in the form that Vertex AI takes",
            "It must be projects/PROJECT_NUMBER/global/networks/NAME, and peered with Vertex AI.",
            field="identity.network",
        )
    empty = sorted(name for name, value in spec.env.items() if not value)
    if empty:
        raise PlanRefused(
            f"env: {', '.join(empty)} is empty, and Vertex AI refuses an empty environment variable",
            "Leave it out, or give it a value.",
            field=f"env.{empty[0]}",
        )
    if spec.vertex.tensorboard and not spec.identity.service_account:
        raise PlanRefused(
            "vertex.tensorboard needs identity.service_account (Vertex AI refuses the job without one)",
            "Name an account that may write to the TensorBoard and to the output's bucket.",
            field="vertex.tensorboard",
        )


def of_secrets(spec: JobSpec, context: Context) -> None:
    """A job without an account of its own runs as a service agent of Vertex AI's, which can be given no token for
    other services (Vertex AI, access control: the custom code service agent)."""
    if spec.secrets and not spec.identity.service_account and not context.cloud_here:
        raise PlanRefused(
            f"secrets ({', '.join(spec.secrets)}) need identity.service_account: Vertex AI's own can't read them",
            "Name an account that may read them (roles/secretmanager.secretAccessor) and write to the bucket.",
            field="secrets",
        )


def of_processes(spec: JobSpec, chosen: Chosen) -> None:
    """A global batch that the built-in trainer can't share evenly: it would find out on the paid machine."""
    if not spec.run.is_builtin:
        return
    from launch_train.common.config import parse

    config = parse(spec.run.config)
    processes = chosen.gpus * spec.machine.nodes
    micro = config.micro_batch_size or 1
    if config.batch_size % (processes * micro):
        each = f" of micro_batch_size {micro}" if micro > 1 else ""
        near = max(1, round(config.batch_size / (processes * micro))) * processes * micro
        raise PlanRefused(
            f"run.config.batch_size {config.batch_size} can't be shared evenly by {processes} processes{each}",
            f"It is global: {near} can.",
            field="run.config.batch_size",
        )
    if config.parallel == "fsdp" and config.optimizer.name == "sgd" and config.optimizer.fused and processes > 1:
        raise PlanRefused(
            "run.config.optimizer.fused: parallel: fsdp has no fused SGD",
            "Leave it out, or use adamw.",
            field="run.config.optimizer.fused",
        )


def of_precision(spec: JobSpec, context: Context, chosen: Chosen) -> None:
    """Numbers that the GPU hasn't, which launch_train.performance.precision would refuse on the paid machine. A figure
    that is unknown for all kinds of numbers says nothing."""
    if not spec.run.is_builtin or context.target == "local":
        return
    asked, peaks = spec.run.config.get("precision"), chosen.gpu.peak_tflops
    if asked in ("bf16", "tf32") and peaks.get("fp32") is not None and peaks.get(asked) is None:
        raise PlanRefused(
            f"run.config.precision: {chosen.gpu.title} has no {asked}",
            "Use fp16 or fp32, or leave it out: the trainer takes what the GPU is best at.",
            field="run.config.precision",
        )


def of_attention(spec: JobSpec, context: Context, chosen: Chosen) -> None:
    """Kernels for GPUs from Ampere on, which have bf16, and for numbers of 16 bits (PyTorch 2.13, sdp_utils.cpp)."""
    config, peaks = spec.run.config, chosen.gpu.peak_tflops
    asked, numbers = config.get("attention"), config.get("precision")
    if not spec.run.is_builtin or context.target == "local" or asked not in ("flash", "cudnn"):
        return
    older = peaks.get("fp32") is not None and peaks.get("bf16") is None
    if older or numbers in ("fp32", "tf32"):
        lacks = f"{chosen.gpu.title} is older than Ampere" if older else f"precision: {numbers} has 32"
        raise PlanRefused(
            f"run.config.attention: {asked} is for numbers of 16 bits on GPUs from Ampere on, and {lacks}",
            "Use efficient, or leave it out: torch takes the fastest that there is.",
            field="run.config.attention",
        )


def of_image(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """A PyTorch that the machine's GPU can't run, or that leaves it idle."""
    wheel, elsewhere = spec.image.wheel, context.target != "local" and not context.cloud_here
    if wheel == "cpu" and elsewhere:
        raise PlanRefused(
            f"image.wheel: cpu has no CUDA, and {chosen.gpu.title} is paid for",
            "Leave it out: it is for `launch local` on a machine without GPUs.",
            field="image.wheel",
        )
    if elsewhere and is_loopback((spec.image.uri or spec.image.repository or "").partition("/")[0]):
        raise PlanRefused(
            f"image: {spec.image.uri or spec.image.repository} is on this machine, where no other can pull it from",
            "Name a repository of Artifact Registry (image.repository), or leave it out.",
            field="image.uri" if spec.image.uri else "image.repository",
        )
    if elsewhere and "+cpu" in (spec.image.torch or ""):
        raise PlanRefused(
            f"image.torch: {spec.image.torch} has no CUDA, and {chosen.gpu.title} is paid for",
            "Leave it out, or name a wheel with CUDA.",
            field="image.torch",
        )
    if wheel not in (None, "cpu") and not catalog.runs(wheel, chosen.gpu):
        raise PlanRefused(
            f"image.wheel: {wheel} doesn't run on {chosen.gpu.title}",
            f"Leave it out: {chosen.gpu.wheel} does.",
            field="image.wheel",
        )


def of_machine(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """What the machine can't have on this service."""
    machine = chosen.machine
    if machine is None or context.target == "local":
        return
    check_boot_disk(spec, context, machine)
    wanted, most = (spec.machine.local_ssds or 0) * LOCAL_SSD_GIB, machine.local_ssd_max_gib
    if context.target == "vm" and not machine.local_ssd_auto and most is not None and wanted > most:
        raise PlanRefused(
            f"machine.local_ssds: {spec.machine.local_ssds} x {LOCAL_SSD_GIB} GiB is more than {machine.name} takes",
            f"It takes at most {most // LOCAL_SSD_GIB}.",
            field="machine.local_ssds",
        )
    settings = catalog.nccl(machine, SERVICE[context.target])
    if context.target == "vertex" and spec.vertex.reduction_server:
        of_reduction_server(spec, machine, settings)


def of_reduction_server(spec: JobSpec, machine: MachineType, settings: Nccl) -> None:
    """Servers that would be paid for and have nothing to do: NCCL needs a plugin to find them, Debian's package
    google-reduction-server, and a machine with a network of its own has another plugin in its place."""
    if settings.env or settings.script:
        raise PlanRefused(
            f"a reduction server doesn't go with {machine.name}, which has a fast network of its own",
            "Leave vertex.reduction_server out.",
            field="vertex.reduction_server",
        )
    if not (spec.image.uri or spec.image.base):
        raise PlanRefused(
            "a reduction server needs NCCL's plugin google-reduction-server in the image, and launch puts none there",
            "Bring an image that has it (image.uri, or image.base to build on), or leave vertex.reduction_server out.",
            field="vertex.reduction_server",
        )


def check_boot_disk(spec: JobSpec, context: Context, machine: MachineType) -> None:
    """The disk types that each machine boots from differ by service."""
    allowed = machine.boot_disk_types if context.target == "vm" else machine.vertex_boot_disk_types
    wanted = spec.machine.boot_disk_type
    if wanted and allowed and wanted not in allowed:
        service = "Compute Engine" if context.target == "vm" else "Vertex AI"
        raise PlanRefused(
            f"machine.boot_disk_type: {machine.name} can't boot from {wanted} on {service}",
            f"It can from {' or '.join(allowed)}.",
            field="machine.boot_disk_type",
        )


def of_places(spec: JobSpec, context: Context, places: tuple[Place, ...]) -> None:
    """Resources that must lie in the region of the job."""
    if context.target == "local":
        return
    if context.target == "vertex" and spec.vertex.persistent_resource and len({place.region for place in places}) > 1:
        raise PlanRefused(
            "vertex.persistent_resource lies in one region, and the job may be tried in several",
            "Name the region where it lies: --region REGION",
            field="vertex.persistent_resource",
        )
    for field, name in regional(spec, context):
        parts = (name or "").split("/")
        location = parts[3] if len(parts) > 4 else None
        for place in places:
            if location not in (None, "global", place.region):
                raise PlanRefused(
                    f"{field} is in {location}, and the job may be tried in {place.region}",
                    f"Name {location} alone: --region {location}",
                    field=field,
                )


def regional(spec: JobSpec, context: Context) -> tuple[tuple[str, str | None], ...]:
    """Fields that may name a resource of one region, as projects/P/locations|regions/REGION/…"""
    identity = spec.identity
    if context.target == "vm":
        return (("identity.kms_key", identity.kms_key), ("identity.subnetwork", identity.subnetwork))
    return (
        ("identity.kms_key", identity.kms_key),
        ("identity.psc.network_attachment", identity.psc.network_attachment if identity.psc else None),
        ("vertex.tensorboard", spec.vertex.tensorboard),
    )


def of_environment(spec: JobSpec, context: Context, container: Container) -> None:
    """More variables than Vertex AI takes."""
    if context.target == "vertex" and len(container.env) > MAX_ENV:
        raise PlanRefused(
            f"the container would have {len(container.env)} environment variables, and Vertex AI takes {MAX_ENV}",
            f"launch itself needs {len(container.env) - len(spec.env)} for this machine: shorten env.",
            field="env",
        )

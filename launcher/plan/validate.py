"""Refuse well-formed specs that cannot work on their target, before anything is billed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launch_train.common.config import Data, ExternalModel
from launch_train.common.loopback import is_loopback
from launcher.catalog import Catalog, MachineType, Nccl
from launcher.errors import PlanRefused
from launcher.plan import iam_commands, mounts, names
from launcher.plan.model import Chosen, Container, Context, Placement
from launcher.plan.placement import MIN_WAIT, SERVICE
from launcher.plan.recipe import cuda_problem, recipe_of, torch_of, uses_base_torch
from launcher.spec.checks import config_of, custom_functions
from launcher.spec.models import JobSpec
from launcher.text import did_you_mean, near, parse_duration

RUN_ID = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
PEERED_NETWORK = r"projects/[^/]+/global/networks/[^/]+"
MAX_ENV = 100
"""Environment variables of one container on Vertex AI (ContainerSpec.env, aiplatform_v1)."""
LOCAL_SSD_GIB = 375
MAX_VM_NAME = 63
"""Characters (Compute Engine, RFC 1035)."""
STORED = "projects/"
"""The beginning of a webhook that is a version in Secret Manager."""
MIN_IDLE_STOP = 300
"""Seconds."""


def check_spec(spec: JobSpec, context: Context) -> None:
    """Check what does not depend on the machine. Raises PlanRefused."""
    if context.run_id and not re.fullmatch(RUN_ID, context.run_id):
        raise PlanRefused(
            f"invalid run ID {context.run_id!r} in --run-id",
            "Use a-z, 0-9 and -, at most 63 characters, starting with a letter: it becomes a label and a VM name.",
        )
    total = spec.limits.wait_total
    if total and parse_duration(total) < MIN_WAIT:
        raise PlanRefused(
            f"limits.wait_total: {total} is too short: each attempt waits at least {MIN_WAIT} s for machines",
            f"Use {MIN_WAIT}s or more: --set limits.wait_total=2h",
            field="limits.wait_total",
        )
    output = spec.output or "gs://"
    if context.target != "local" and context.training and not output.startswith("gs://"):
        raise PlanRefused(
            f"output: {output} is a local folder, which a machine in the cloud cannot write to",
            "Use a bucket: --output gs://BUCKET/PATH",
            field="output",
        )
    if context.training:
        check_webhook(spec, context)
    if context.target == "vm":
        check_vm(spec, context)
    elif context.target == "vertex":
        check_vertex(spec)
        mounts.check_vertex_mounts(spec)
        check_secrets_account(spec, context)


def check_vm(spec: JobSpec, context: Context) -> None:
    """Check what Compute Engine would refuse, and the service account. Raises PlanRefused."""
    if spec.name.endswith("-"):
        problem = f"name: {spec.name!r} ends with -, which a VM name cannot"
        raise PlanRefused(problem, f"Use another name: --name {spec.name.rstrip('-')}", field="name")
    if spec.run.node == "none":
        raise PlanRefused(
            "run.node: none: a VM's startup script reports through launch's node",
            "Use Vertex AI (launch vertex), or run.node: append",
            field="run.node",
        )
    if spec.machine.nodes > 1:
        check_several_vms(spec, context)
    if context.training:
        mounts.check_vm_mounts(spec, context)
    if spec.vm.idle_stop and parse_duration(spec.vm.idle_stop) < MIN_IDLE_STOP:
        raise PlanRefused(
            f"vm.idle_stop: {spec.vm.idle_stop} is too short: the VM would stop during a pause in your work",
            f"Use {MIN_IDLE_STOP // 60}m or more: --set vm.idle_stop=30m",
            field="vm.idle_stop",
        )
    account = spec.identity.service_account or ""
    if account.endswith("-compute@developer.gserviceaccount.com") and not context.allow_default_account:
        refuse_default_account(spec, context)


def check_several_vms(spec: JobSpec, context: Context) -> None:
    """Check what a spec with several nodes cannot have on Compute Engine. Raises PlanRefused."""
    nodes = spec.machine.nodes
    if not context.training:
        raise PlanRefused(
            f"machine.nodes: {nodes} VMs, but launch vm without --run creates a single VM to work on",
            "Use --nodes 1, or --run to train on all of them.",
            field="machine.nodes",
        )
    if "flex-start" in (spec.provisioning or ()):
        raise PlanRefused(
            f"flex-start on Compute Engine supports a single VM, and machine.nodes is {nodes}",
            "Use --provisioning spot, or Vertex AI, which has flex-start for several nodes: launch vertex SPEC",
            field=f"provisioning.{(spec.provisioning or ()).index('flex-start')}",
        )
    longest = f"{context.run_id}-n{nodes - 1}" if context.run_id else ""
    if len(longest) > MAX_VM_NAME:
        raise PlanRefused(
            f"--run-id {context.run_id!r} is too long for {nodes} VMs: the VM name {longest} has {len(longest)} "
            "characters",
            f"Use a shorter run ID: a VM name has at most {MAX_VM_NAME} characters.",
        )


def refuse_default_account(spec: JobSpec, context: Context) -> None:
    """Refuse the default compute service account: any program on the VM could delete other machines of the project,
    and read all its buckets."""
    deletes = f"{spec.name}-" if context.training else None
    output = (spec.output or names.default_output(context.project)) if context.training else None
    raise PlanRefused(
        "the VM would run as the default compute service account, which can change the whole project",
        "Create an account with few roles, and set it as identity.service_account (or remove that setting):\n"
        f"{iam_commands.account(context.project, output, deletes=deletes)}\n"
        "To use the default account anyway: --allow-default-service-account",
        field="identity.service_account",
    )


def check_vertex(spec: JobSpec) -> None:
    """Check what Vertex AI would refuse. Raises PlanRefused."""
    if spec.vertex.persistent_resource and any(model.startswith("reservation:") for model in spec.provisioning or ()):
        raise PlanRefused(
            "vertex.persistent_resource cannot be combined with a reservation: its machines exist already",
            "Remove one of the two.",
            field="vertex.persistent_resource",
        )
    network = spec.identity.network
    if network and not re.fullmatch(PEERED_NETWORK, network):
        raise PlanRefused(
            f"identity.network: invalid network {network!r} for Vertex AI",
            "Use projects/PROJECT_NUMBER/global/networks/NAME, a network that is peered with Vertex AI.",
            field="identity.network",
        )
    empty = sorted(name for name, value in spec.env.items() if not value)
    if empty:
        raise PlanRefused(
            f"env: {', '.join(empty)}: empty value, which Vertex AI refuses",
            "Remove the variable, or give it a value.",
            field=f"env.{empty[0]}",
        )
    if spec.vertex.tensorboard and not spec.identity.service_account:
        raise PlanRefused(
            "vertex.tensorboard needs identity.service_account: Vertex AI refuses the job without one",
            "Set an account that can write to the TensorBoard and to the output bucket:\n"
            "--set identity.service_account=NAME@PROJECT.iam.gserviceaccount.com",
            field="vertex.tensorboard",
        )


def check_secrets_account(spec: JobSpec, context: Context) -> None:
    """Check that a job with secrets names a service account. The default, Vertex AI's service agent for custom code,
    cannot get tokens for other services (Vertex AI, access control). Raises PlanRefused."""
    named = [*spec.secrets, *(["notify.webhook"] if spec.notify and spec.notify.webhook.startswith(STORED) else [])]
    if named and not spec.identity.service_account and not context.is_local_cloud:
        raise PlanRefused(
            f"secrets ({', '.join(named)}) need identity.service_account: Vertex AI's own account cannot read them",
            "Set an account that can read them (roles/secretmanager.secretAccessor) and write to the output bucket:\n"
            "--set identity.service_account=NAME@PROJECT.iam.gserviceaccount.com",
            field="secrets" if spec.secrets else "notify.webhook",
        )


def check_webhook(spec: JobSpec, context: Context) -> None:
    """Refuse a webhook's URL in a request, which the cloud stores and shows: whoever has it can send in its name.
    Raises PlanRefused."""
    if spec.notify is None or context.target == "local" or spec.notify.webhook.startswith(STORED):
        return
    if context.is_local_cloud and is_loopback(spec.notify.webhook):
        return
    secret = f"projects/{context.project}/secrets/launch-webhook/versions/latest"
    raise PlanRefused(
        "notify.webhook: a URL is a secret, and others can read the request",
        "Store it in Secret Manager, and name it there:\n"
        "printf %s URL | gcloud secrets create launch-webhook --data-file=-\n"
        f"--set notify.webhook={secret}",
        field="notify.webhook",
    )


def check_processes(spec: JobSpec, chosen: Chosen) -> None:
    """Check that the built-in trainer can divide the global batch evenly, which it would otherwise find out on the
    paid machine. Raises PlanRefused."""
    if not spec.run.is_builtin:
        return
    config = config_of(spec.run)
    processes = chosen.gpus * spec.machine.nodes
    micro = config.micro_batch_size or 1
    if config.batch_size % (processes * micro):
        each = f" of micro_batch_size {micro}" if micro > 1 else ""
        near = max(1, round(config.batch_size / (processes * micro))) * processes * micro
        raise PlanRefused(
            f"run.config.batch_size: {config.batch_size} cannot be divided evenly among {processes} processes{each}",
            f"Use a multiple of {processes * micro}, such as {near}: batch_size is global, over all processes.",
            field="run.config.batch_size",
        )
    if config.parallel == "fsdp" and config.optimizer.name == "sgd" and config.optimizer.fused and processes > 1:
        raise PlanRefused(
            "run.config.optimizer.fused: there is no fused SGD for parallel: fsdp",
            "Remove it, or use adamw.",
            field="run.config.optimizer.fused",
        )


def check_precision(spec: JobSpec, context: Context, chosen: Chosen) -> None:
    """Check that the GPU has the precision, which launch_train.performance.precision would otherwise refuse on the paid
    machine. A GPU without any known figure passes. Raises PlanRefused."""
    if not spec.run.is_builtin or context.target == "local":
        return
    precision, peaks = spec.run.config.get("precision"), chosen.gpu.peak_tflops
    if precision in ("bf16", "tf32") and peaks.get("fp32") is not None and peaks.get(precision) is None:
        raise PlanRefused(
            f"run.config.precision: {chosen.gpu.title} does not support {precision}",
            "Use fp16 or fp32, or remove it: the default is the fastest precision that the GPU supports.",
            field="run.config.precision",
        )


def check_attention(spec: JobSpec, context: Context, chosen: Chosen) -> None:
    """Check that the GPU has the attention kernel: flash and cudnn need Ampere or newer (which have bf16) and 16-bit
    precision (PyTorch 2.13, sdp_utils.cpp). Raises PlanRefused."""
    config, peaks = spec.run.config, chosen.gpu.peak_tflops
    kernel, precision = config.get("attention"), config.get("precision")
    if not spec.run.is_builtin or context.target == "local" or kernel not in ("flash", "cudnn"):
        return
    is_older = peaks.get("fp32") is not None and peaks.get("bf16") is None
    if is_older or precision in ("fp32", "tf32"):
        why = f"{chosen.gpu.title} is older" if is_older else f"run.config.precision is {precision}"
        raise PlanRefused(
            f"run.config.attention: {kernel} needs an Ampere or newer GPU and 16-bit precision; {why}",
            "Use efficient, or remove it: PyTorch then chooses the fastest kernel that works.",
            field="run.config.attention",
        )


def check_image(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """Check that the machine can pull the image, and that its PyTorch runs on the GPU. Raises PlanRefused."""
    wheel, is_remote = spec.image.wheel, context.target != "local" and not context.is_local_cloud
    if wheel == "cpu" and is_remote:
        raise PlanRefused(
            f"image.wheel: cpu has no CUDA, so the {chosen.gpu.title} would be paid for and idle",
            "Remove it: it is for `launch local` on a machine without GPUs.",
            field="image.wheel",
        )
    if is_remote and is_loopback((spec.image.uri or spec.image.repository or "").partition("/")[0]):
        raise PlanRefused(
            f"image: {spec.image.uri or spec.image.repository} is on this machine; the job's machine cannot pull it",
            "Use Artifact Registry: --set image.repository=LOCATION-docker.pkg.dev/PROJECT/REPOSITORY; or remove it.",
            field="image.uri" if spec.image.uri else "image.repository",
        )
    if is_remote and "+cpu" in (spec.image.torch or ""):
        raise PlanRefused(
            f"image.torch: {spec.image.torch} has no CUDA, so the {chosen.gpu.title} would be paid for and idle",
            "Remove it, or use a wheel with CUDA.",
            field="image.torch",
        )
    torch, packages = torch_of(spec, catalog, context, chosen), context.packages
    recipe_of(spec, catalog, context, torch, wheel or chosen.gpu.wheel)
    if torch is None and packages.tool == "conda":
        why = cuda_problem(catalog, chosen.gpu, packages.index_build)
        if packages.index_build == "cpu" and is_remote:
            why = f"it has no CUDA, so the {chosen.gpu.title} would be paid for and idle"
        if why:
            fix = "Name another CUDA in the file, or choose another GPU."
            raise PlanRefused(f"{packages.index_where}: {why}", fix, field="image.requirements")
    elif torch is None and wheel not in (None, "cpu") and not catalog.runs(wheel, chosen.gpu):
        raise PlanRefused(
            f"image.wheel: {wheel} does not run on {chosen.gpu.title}",
            f"Use {chosen.gpu.wheel}, or remove it: that is the default.",
            field="image.wheel",
        )


def check_gpu_memory(spec: JobSpec, chosen: Chosen) -> None:
    """Check that a process's share of the GPU's memory is not more than all of it. Raises PlanRefused."""
    wanted, most = spec.machine.gpu_memory_gb, chosen.gpu.memory_gb
    if wanted and wanted > most:
        raise PlanRefused(
            f"machine.gpu_memory_gb: {wanted:g} is more than {chosen.gpu.title} has ({most} GB)",
            f"Use {most} or less, or remove it: by default a process may use all memory.",
            field="machine.gpu_memory_gb",
        )


def check_machine(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen) -> None:
    """Check what the machine type does not support on this service. Raises PlanRefused."""
    machine = chosen.machine
    if machine is None or context.target == "local":
        return
    check_boot_disk(spec, context, machine)
    wanted, limit = (spec.machine.local_ssds or 0) * LOCAL_SSD_GIB, machine.local_ssd_max_gib
    if context.target == "vm" and not machine.local_ssd_auto and limit is not None and wanted > limit:
        raise PlanRefused(
            f"machine.local_ssds: {spec.machine.local_ssds} is more than {machine.name} supports",
            f"Use {limit // LOCAL_SSD_GIB} or fewer ({LOCAL_SSD_GIB} GiB each).",
            field="machine.local_ssds",
        )
    for index, mount in enumerate(spec.mounts if context.target == "vm" and context.training else ()):
        if mount.new_disk_type and machine.boot_disk_types and mount.new_disk_type not in machine.boot_disk_types:
            problem = f"{machine.name} does not support {mount.new_disk_type}"
            raise mounts.refusal(index, "new_disk_type", problem, f"Use {' or '.join(machine.boot_disk_types)}.")
    settings = catalog.nccl(machine, SERVICE[context.target])
    if context.target == "vertex" and spec.vertex.reduction_server:
        check_reduction_server(spec, machine, settings)


def check_reduction_server(spec: JobSpec, machine: MachineType, settings: Nccl) -> None:
    """Refuse reduction servers that would be paid for and idle. Raises PlanRefused.

    NCCL finds them only with the plugin of the Debian package google-reduction-server, and a machine with a fast
    network needs another plugin in its place.
    """
    if settings.env or settings.script:
        raise PlanRefused(
            f"vertex.reduction_server has no effect on {machine.name}, which has a fast network",
            "Remove vertex.reduction_server.",
            field="vertex.reduction_server",
        )
    if not spec.image.is_custom:
        raise PlanRefused(
            "vertex.reduction_server needs the NCCL plugin google-reduction-server, which launch's image lacks",
            "Use an image that has it (image.uri, or image.base to build on), or remove vertex.reduction_server.",
            field="vertex.reduction_server",
        )


def check_boot_disk(spec: JobSpec, context: Context, machine: MachineType) -> None:
    """Check the boot disk's type; the supported types differ by machine type and service. Raises PlanRefused."""
    allowed = machine.boot_disk_types if context.target == "vm" else machine.vertex_boot_disk_types
    wanted = spec.machine.boot_disk_type
    if wanted and allowed and wanted not in allowed:
        service = "Compute Engine" if context.target == "vm" else "Vertex AI"
        raise PlanRefused(
            f"machine.boot_disk_type: {machine.name} cannot boot from {wanted} on {service}",
            f"Use {' or '.join(allowed)}.",
            field="machine.boot_disk_type",
        )


def check_regions(spec: JobSpec, context: Context, placements: Sequence[Placement]) -> None:
    """Check that regional resources are in the region of each attempt. Raises PlanRefused."""
    if context.target == "local":
        return
    if (
        context.target == "vertex"
        and spec.vertex.persistent_resource
        and len({placement.region for placement in placements}) > 1
    ):
        raise PlanRefused(
            "vertex.persistent_resource exists in one region, but the job may run in several",
            "Set its region: --region REGION",
            field="vertex.persistent_resource",
        )
    if context.target == "vm" and context.training:
        mounts.check_zones(spec, placements)
    for field, name in regional_resources(spec, context):
        parts = (name or "").split("/")
        location = parts[3] if len(parts) > 4 else None
        for placement in placements:
            if location not in (None, "global", placement.region):
                raise PlanRefused(
                    f"{field} is in {location}, but the job may run in {placement.region}",
                    f"Use that region alone: --region {location}",
                    field=field,
                )


def regional_resources(spec: JobSpec, context: Context) -> tuple[tuple[str, str | None], ...]:
    """Return the settings that may name a resource of one region, as projects/P/locations|regions/REGION/…"""
    identity = spec.identity
    if context.target == "vm":
        return (("identity.kms_key", identity.kms_key), ("identity.subnetwork", identity.subnetwork))
    return (
        ("identity.kms_key", identity.kms_key),
        ("identity.psc.network_attachment", identity.psc.network_attachment if identity.psc else None),
        ("vertex.tensorboard", spec.vertex.tensorboard),
    )


def check_environment(spec: JobSpec, context: Context, container: Container) -> None:
    """Check the number of environment variables. Raises PlanRefused."""
    if context.target == "vertex" and len(container.env) > MAX_ENV:
        own = len(container.env) - len(spec.env)
        raise PlanRefused(
            f"env: {len(container.env)} environment variables in total, but Vertex AI allows {MAX_ENV}",
            f"Use {MAX_ENV - own} or fewer in env: launch needs {own} on this machine.",
            field="env",
        )


TOKENS = ("causal-lm", "masked-lm")
"""The tasks whose data is text."""


def check_model(spec: JobSpec, catalog: Catalog) -> None:
    """Check the type of a transformers model, its task, and that a model of text has a block size.

    Raises PlanRefused: the image's transformers has no such type, or the trainer could not build samples for it.
    """
    if not spec.run.is_builtin:
        return
    config = config_of(spec.run)
    model = config.model
    if not isinstance(model, ExternalModel):
        return
    name = model.name.removeprefix("hf:")
    is_type = name != model.name and "/" not in name and not model.pretrained
    tasks = catalog.transformers_types.get(name) if is_type else None
    image = spec.image
    has_locked_version = not (image.is_custom or image.requirements)
    if is_type and has_locked_version:
        check_type(name, model.task, tasks, catalog)
    has_own_data = "run.config.data" in custom_functions(spec.run)
    if config.data.block_size is None and not has_own_data and takes_tokens(model, config.data, tasks):
        raise PlanRefused(
            f"run.config.data.block_size: required for {model.name}: the number of tokens per sample",
            "Set it: --set run.config.data.block_size=1024",
            field="run.config.data.block_size",
        )


def check_type(name: str, task: str, tasks: tuple[str, ...] | None, catalog: Catalog) -> None:
    """Check that transformers has a type, and that the type has the task. Raises PlanRefused."""
    if tasks is None:
        close = [f"hf:{model_type}" for model_type in near(name, catalog.transformers_types)]
        raise PlanRefused(
            f"run.config.model: unknown transformers model type {name}",
            (did_you_mean(close) + " " if close else "")
            + f"For a model of the Hugging Face Hub use hf:ORG/NAME, or {{name: hf:{name}, pretrained: true}}.",
            field="run.config.model.name",
        )
    if not tasks or task not in ("auto", *tasks):
        raise PlanRefused(
            f"run.config.model: transformers' {name} has no head for {'any task' if task == 'auto' else task}",
            f"Use the task {' or '.join(tasks)}." if tasks else "Train it with a custom script (run.script).",
            field="run.config.model.task",
        )


def takes_tokens(model: ExternalModel, data: Data, tasks: tuple[str, ...] | None) -> bool:
    """Return whether the model certainly takes tokens. `tasks` are those of its type; None if unknown."""
    task = model.task if model.task != "auto" or not tasks else tasks[0]
    if task != "auto":
        return task in TOKENS
    if data.path == "synthetic":  # a model of the hub may be one of images
        return not model.name.startswith("hf:") and data.image_size is None
    return data.path == "python-stdlib" or data.tokenizer != "bytes"


PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow-skinny", "mlflow")}
"""Packages that have a logger's client; one of them must be in the image."""
BOARD = frozenset({"tensorboard", "vertex"})
"""Loggers that write TensorBoard's event files, which a TensorBoard instance on Vertex AI reads."""


def loggers_of(spec: JobSpec) -> tuple[str, tuple[str, ...] | None]:
    """Return the setting and its loggers; None: the default."""
    if spec.run.is_builtin:
        loggers = spec.run.config.get("loggers")
        return "run.config.loggers", None if loggers is None else tuple(loggers)
    return "run.loggers", spec.run.loggers


def check_loggers(spec: JobSpec, catalog: Catalog, context: Context) -> None:
    """Check that each logger has its package in the image and its settings in the job. Raises PlanRefused."""
    field, names = loggers_of(spec)
    if names is None or context.target == "local":
        return
    # Otherwise the image may have the package.
    is_known = not (spec.image.uri or spec.image.setup or uses_base_torch(spec, catalog))
    for name in names:
        packages = PACKAGES.get(name, ())
        if packages and is_known and not set(packages) & set(context.packages.loggers):
            raise PlanRefused(
                f"{field}: {name}: the image would not have its package",
                f"Add a line to image.requirements ({spec.image.requirements or 'requirements.txt'}): {packages[0]}",
                field=field,
            )
    if "vertex" in names and context.target == "vm":
        raise PlanRefused(
            f"{field}: vertex: only jobs on Vertex AI have a TensorBoard instance",
            "Use tensorboard (the events are in the run folder), or Vertex AI: launch vertex SPEC",
            field=field,
        )
    if context.target == "vertex":
        check_board(spec, field, names)


def check_board(spec: JobSpec, field: str, names: tuple[str, ...]) -> None:
    """Check that a TensorBoard instance has events, and the events an instance. Raises PlanRefused."""
    if "vertex" in names and not spec.vertex.tensorboard:
        raise PlanRefused(
            f"{field}: vertex: the job has no TensorBoard instance",
            "Name one: --set vertex.tensorboard=projects/P/locations/L/tensorboards/ID\n"
            "To list them: gcloud ai tensorboards list --region REGION",
            field=field,
        )
    if spec.vertex.tensorboard and BOARD.isdisjoint(names):
        raise PlanRefused(
            f"vertex.tensorboard would stay empty: {field} names neither vertex nor tensorboard",
            f"Add vertex to {field}, or remove vertex.tensorboard.",
            field="vertex.tensorboard",
        )

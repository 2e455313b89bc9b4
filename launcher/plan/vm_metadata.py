"""Build a VM's metadata; the item `launch` holds the parameters of its startup script, as JSON.

The script (launcher/services/compute/startup.sh) is the same for every VM, except for jobs with mounts
(launcher.plan.mounts). It parses this JSON and passes the values on as separate arguments, so that no value of a spec
is ever interpreted by a shell.
"""

from __future__ import annotations

import re
from typing import Any

from launcher.errors import PlanRefused
from launcher.jobs.vm import PARAMETERS
from launcher.plan import iam_commands, mounts
from launcher.plan.container import as_json, expanded
from launcher.plan.model import Container, Context, Placement, Shared
from launcher.plan.names import default_service_account
from launcher.spec.models import JobSpec
from launcher.text import parse_duration

MAX_ITEM = 256 * 1024
"""Maximum bytes of a metadata value (Compute Engine, VM metadata: limitations)."""
MAX_ARGUMENT = 128 * 1024
"""Maximum bytes of an argument or variable of a process, with its terminator (Linux, MAX_ARG_STRLEN)."""
WITH_DRIVER = r".*-nvidia-[0-9]+"
"""Image families that include a driver (Deep Learning VM: FRAMEWORK-CUDA-OS-DRIVER)."""


def metadata(
    spec: JobSpec, context: Context, shared: Shared, placement: Placement, family: str
) -> list[dict[str, str]]:
    """Return all metadata items. OS Login replaces SSH keys; the script reports its progress in guest attributes.

    Raises:
        PlanRefused: environment or arguments exceed the limits of VM metadata or of a process.
    """
    if not context.startup:
        raise ValueError("a VM needs the startup script")
    driver = {} if re.fullmatch(WITH_DRIVER, family) and not spec.vm.image else {"install-nvidia-driver": "True"}
    items = {
        "enable-oslogin": "TRUE",
        "enable-guest-attributes": "TRUE",
        **driver,
        "startup-script": mounts.startup_script(spec, context, training=shared.container is not None),
        PARAMETERS: parameters(spec, context, shared, placement),
    }
    return [{"key": key, "value": value} for key, value in items.items()]


def parameters(spec: JobSpec, context: Context, shared: Shared, placement: Placement) -> str:
    """Return the item `launch` as canonical JSON.

    Raises:
        PlanRefused: it is too large.
    """
    container = expanded(shared.container) if shared.container else None
    values = (
        training_parameters(spec, context, shared, placement, container) if container else workstation_parameters(spec)
    )
    text = as_json(values)
    if (size := len(text.encode())) > MAX_ITEM:
        raise PlanRefused(
            f"env and arguments: {size // 1024} KiB is too large for VM metadata, which holds {MAX_ITEM // 1024} KiB",
            "Move large values to a file in image.code, or to a bucket.",
            field="env",
        )
    return text


def workstation_parameters(spec: JobSpec) -> dict[str, Any]:
    """Return the parameters of a VM to work on, for its watchdog."""
    vm = spec.vm
    return {
        "kind": "work",
        "on_stop": on_stop(spec, training=False),
        **({"lease_seconds": parse_duration(vm.lease)} if vm.lease else {}),
        **({"idle_stop_seconds": parse_duration(vm.idle_stop)} if vm.idle_stop else {}),
    }


def training_parameters(
    spec: JobSpec, context: Context, shared: Shared, placement: Placement, container: Container
) -> dict[str, Any]:
    """Return the parameters of a training VM: container, nodes, and the grant to report if the VM cannot delete
    itself. Raises PlanRefused."""
    entrypoint, *rest = container.command
    arguments = [*rest, *container.args]
    check_argument_sizes(container.env, arguments)
    account = account_of(spec, context)
    return {
        "kind": "train",
        "run": shared.run,
        "run_folder": shared.run_folder,
        "image": shared.image.uri if shared.image else "",
        "entrypoint": entrypoint,
        "arguments": arguments,
        "env": container.env,
        **({"mounts": mounts.parameters(spec)} if spec.mounts else {}),
        "nodes": list(nodes(spec, shared)),
        "domain": domain(context.project, placement),
        "account": account,
        "grant": iam_commands.self_delete(context.project, account, prefix(spec, shared.run)),
    }


def check_argument_sizes(env: dict[str, str], arguments: list[str]) -> None:
    """Check that Linux can start a process with these variables and arguments. Raises PlanRefused."""
    variables = [(f"env.{name}", f"{name}={value}") for name, value in env.items()]
    for field, text in (*variables, *(("run.args", argument) for argument in arguments)):
        if (size := len(text.encode())) >= MAX_ARGUMENT:
            raise PlanRefused(
                f"{field}: {size // 1024} KiB is too large: Linux allows {MAX_ARGUMENT // 1024} KiB per argument",
                "Move it to a file in image.code, or to a bucket.",
                field=field,
            )


def on_stop(spec: JobSpec, *, training: bool) -> str:
    """Return what happens to the VM at the end of its time: stop or delete."""
    return spec.vm.on_stop or ("delete" if training else "stop")


def account_of(spec: JobSpec, context: Context) -> str:
    """Return the VM's service account; `default` is Compute Engine's, if --allow-default-service-account allows it."""
    own = "default" if context.allow_default_account else default_service_account(context.project)
    return spec.identity.service_account or own


def nodes(spec: JobSpec, shared: Shared) -> tuple[str, ...]:
    """Return the VMs' names, node 0 first."""
    count = spec.machine.nodes
    return (shared.run,) if count == 1 else tuple(f"{shared.run}-n{node}" for node in range(count))


def prefix(spec: JobSpec, run: str) -> str:
    """Return the name prefix of this spec's VMs, so that one grant covers all its runs; or a custom run id itself."""
    own = f"{spec.name}-"
    return own if run.startswith(own) else run


def domain(project: str, placement: Placement) -> str:
    """Return the DNS domain of the VMs: zonal internal DNS (Compute Engine, VM.ZONE.c.PROJECT.internal). That of a
    domain-scoped project `example.com:p` ends in p.example.com.internal."""
    owner, _, name = project.rpartition(":")
    return f"{placement.zone}.c.{name}{'.' + owner if owner else ''}.internal"

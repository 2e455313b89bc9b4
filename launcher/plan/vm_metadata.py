"""The metadata item `launch` of a VM: what its startup script reads, as JSON.

The script (launcher/compute/startup.sh) is the same text for every VM. It reads this with a JSON parser and passes the
values on as separate words, so that nothing of a spec is ever part of shell text.
"""

from __future__ import annotations

import re
from typing import Any

from launcher.errors import PlanRefused
from launcher.jobs.vm import PARAMETERS
from launcher.plan import iam_commands
from launcher.plan.container import as_json, expanded
from launcher.plan.model import Container, Context, Place, Shared
from launcher.plan.names import default_service_account
from launcher.spec.models import JobSpec
from launcher.text import parse_duration

MAX_ITEM = 256 * 1024
"""Bytes of one metadata value (Compute Engine, VM metadata: limitations)."""
MAX_WORD = 128 * 1024
"""Bytes of one argument or variable of a process, with its end (Linux, MAX_ARG_STRLEN)."""
WITH_DRIVER = r".*-nvidia-[0-9]+"
"""Image families that bring their driver (Deep Learning VM: FRAMEWORK-CUDA-OS-DRIVER)."""


def metadata(spec: JobSpec, context: Context, shared: Shared, place: Place, family: str) -> list[dict[str, str]]:
    """All metadata items. OS Login instead of keys; guest attributes, in which the script says how far it is.

    Raises:
        PlanRefused: what the container gets is more than a VM's metadata, or a process, can hold.
    """
    if not context.startup:
        raise ValueError("a VM needs the startup script")
    driver = {} if re.fullmatch(WITH_DRIVER, family) and not spec.vm.image else {"install-nvidia-driver": "True"}
    items = {
        "enable-oslogin": "TRUE",
        "enable-guest-attributes": "TRUE",
        **driver,
        "startup-script": context.startup,
        PARAMETERS: parameters(spec, context, shared, place),
    }
    return [{"key": key, "value": value} for key, value in items.items()]


def parameters(spec: JobSpec, context: Context, shared: Shared, place: Place) -> str:
    """The item `launch`: canonical JSON.

    Raises:
        PlanRefused: it is too large.
    """
    container = expanded(shared.container) if shared.container else None
    text = as_json(training(spec, context, shared, place, container) if container else workplace(spec))
    if (size := len(text.encode())) > MAX_ITEM:
        raise PlanRefused(
            f"env and arguments are {size // 1024} KiB, and a VM's metadata holds {MAX_ITEM // 1024} KiB of them",
            "Put what is large into a file of image.code, or into the bucket.",
            field="env",
        )
    return text


def workplace(spec: JobSpec) -> dict[str, Any]:
    """What a VM to work on is told: what its watchdog does, and when."""
    vm = spec.vm
    return {
        "kind": "work",
        "on_stop": on_stop(spec, training=False),
        **({"lease_seconds": parse_duration(vm.lease)} if vm.lease else {}),
        **({"idle_stop_seconds": parse_duration(vm.idle_stop)} if vm.idle_stop else {}),
    }


def training(spec: JobSpec, context: Context, shared: Shared, place: Place, container: Container) -> dict[str, Any]:
    """What a VM that trains is told: the container, who the nodes are, and the grant it tells of if it lacks it."""
    entrypoint, *rest = container.command
    arguments = [*rest, *container.args]
    check_words(container.env, arguments)
    account = account_of(spec, context)
    return {
        "kind": "train",
        "run": shared.run,
        "run_folder": shared.run_folder,
        "image": shared.image.uri if shared.image else "",
        "entrypoint": entrypoint,
        "arguments": arguments,
        "env": container.env,
        "nodes": list(nodes(spec, shared)),
        "domain": domain(context.project, place),
        "account": account,
        "grant": iam_commands.self_delete(context.project, account, prefix(spec, shared.run)),
    }


def check_words(env: dict[str, str], arguments: list[str]) -> None:
    """Linux starts no process with a longer word."""
    named = [*((f"env.{name}", f"{name}={value}") for name, value in env.items())]
    for field, word in (*named, *(("run.args", argument) for argument in arguments)):
        if (size := len(word.encode())) >= MAX_WORD:
            raise PlanRefused(
                f"{field} is {size // 1024} KiB, and Linux takes {MAX_WORD // 1024} KiB of one argument or variable",
                "Put it into a file of image.code, or into the bucket.",
                field=field,
            )


def on_stop(spec: JobSpec, *, training: bool) -> str:
    """stop or delete: what happens to the VM at the end of its time."""
    return spec.vm.on_stop or ("delete" if training else "stop")


def account_of(spec: JobSpec, context: Context) -> str:
    """The service account that the VM runs as: `default` is Compute Engine's own, where somebody wants that."""
    own = "default" if context.allow_default_account else default_service_account(context.project)
    return spec.identity.service_account or own


def nodes(spec: JobSpec, shared: Shared) -> tuple[str, ...]:
    """The VMs' names, node 0 first."""
    count = spec.machine.nodes
    return (shared.run,) if count == 1 else tuple(f"{shared.run}-n{node}" for node in range(count))


def prefix(spec: JobSpec, run: str) -> str:
    """What the names of this spec's VMs start with, so that one grant is for all its runs; the run's own name where it
    was set by hand."""
    own = f"{spec.name}-"
    return own if run.startswith(own) else run


def domain(project: str, place: Place) -> str:
    """Where VMs find each other by name: zonal internal DNS (Compute Engine, VM.ZONE.c.PROJECT.internal). That of a
    domain-scoped project `example.com:p` ends in p.example.com.internal."""
    owner, _, name = project.rpartition(":")
    return f"{place.zone}.c.{name}{'.' + owner if owner else ''}.internal"

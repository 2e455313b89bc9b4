"""Check a host and send the code to it, before anything is started there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from launcher.errors import LaunchError, NoCapacity, UsageError
from launcher.inputs.content import content
from launcher.plan.binding import bound
from launcher.remote.agent import PYTHONS, ROOT, Agent
from launcher.remote.folder import parse_address
from launcher.services.hosts.environment import PROBE_ARGV, facts_of, provide_python, python_of_pyxis

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs
    from launcher.plan.model import Plan
    from launcher.remote.connection import Connection

OF_HOST: Final = ("python", "container")
"""Fields of a request that are filled in on arrival at a host."""
PULL_SECONDS: Final = 7200.0
"""An image may have 20 GB, and Apptainer converts it."""
LEAST_GB: Final = 2.0
"""Free disk below which a checkpoint may not fit."""


def prepare_host(plan: Plan, inputs: Inputs, connection: Connection, say: Callable[[str], None]) -> Plan:
    """Check the host's GPUs and disk, pull the container's image, find or make the Python, send the code, each unless
    it is there, and return the plan with the container and the Python.

    Raises:
        NoCapacity: too few GPUs are free.
        LaunchError: the host can't run the job; the hint says how it can.
    """
    agent, name, source = Agent(connection), connection.host.name, inputs.source
    request = plan.attempts[0].request
    candidates = [request["python"]] if request["python"] else PYTHONS
    probe = {"pythons": candidates, "probe": PROBE_ARGV, "slurm": plan.is_slurm}
    container = request.get("container")
    facts = agent.call("describe", {**probe, **({"pythons": []} if container else {})})
    if facts["slurm_problem"]:
        raise LaunchError(
            f"{name}: Slurm does not answer: {facts['slurm_problem']}", "Name the cluster's login node: --on LOGIN"
        )
    if not plan.is_slurm:
        check_free_gpus(facts["gpus"], str(facts["gpu_problem"]), plan.machine.gpus, name)
    if facts["free_gb"] < LEAST_GB:
        say(f"warning: {facts['free_gb']:.1f} GB are free on the disk of {name}:~/launch")
    if container:
        say(f"{name}: looking at {container['image']}, which is pulled unless it is there…")
        gpus = 0 if plan.is_slurm else plan.machine.gpus
        container = agent.call("container", {**container, **probe, "gpus": gpus}, seconds=PULL_SECONDS)
        facts["pythons"] = container.pop("pythons")
        request = {**request, "container": container}
    known = facts_of(facts, inputs, plan.machine.gpus, name, is_login_node=plan.is_slurm)
    if container and not known.pythons:
        python = python_of_pyxis(request["python"], inputs)
    else:
        python = provide_python(agent, known._replace(container=container), request["python"], inputs, say)
    place = f"{container['runtime']}, {container['image']}, " if container else ""
    say(f"{name}: {'Slurm' if plan.is_slurm else gpus_text(facts['gpus'])}, {place}{python}")
    if code := request["code"]:
        files = [(f"workspace/{file.name}", file.path) for file in source.code]
        texts = {f"project/{path}": text for path, text in source.installed.items()}

        def check() -> None:
            if content(source.code).digest != source.digest:
                raise UsageError("the code changed while it was being sent", "Repeat the command.")

        connection.send(files, f"{ROOT}/code/{code}", texts=texts, check=check)
    attempt = replace(plan.attempts[0], request={**request, "python": python})
    return bound(replace(plan, attempts=(attempt,)))


def prepare_hosts(plan: Plan, inputs: Inputs, connections: Sequence[Connection], say: Callable[[str], None]) -> Plan:
    """Prepare the host of a plan, or the hosts of its nodes, and return the plan with the Python and the addresses of
    each.

    Raises as `prepare_host`; LaunchError: hosts don't reach each other, or don't share the run folder.
    """
    first, *others = connections
    prepared = prepare_host(plan, inputs, first, say)
    if not others:
        return prepared
    attempt = prepared.attempts[0]
    if "@" in (container := attempt.request.get("container", {})).get("image", ""):  # the tag is looked up once
        request = {**plan.attempts[0].request, "container": container}
        plan = bound(replace(plan, attempts=(replace(plan.attempts[0], request=request),)))
    folder = plan.run_folder or ""
    meeting = {
        "nonce": secrets.token_hex(8),
        "count": len(others),
        "folder": "" if folder.startswith("gs://") else parse_address(folder).path.rpartition("/")[0],
        "host": first.host.name,
    }

    def prepare_peer(connection: Connection) -> dict[str, Any]:
        request = prepare_host(plan, inputs, connection, say).attempts[0].request
        return {"host": connection.host.name, **{name: request[name] for name in OF_HOST if name in request}}

    with ThreadPoolExecutor(len(others)) as pool:  # after the first: a home folder may be shared, with the environment
        peers = list(pool.map(prepare_peer, others))
    meeting |= Agent(first).call("open_meeting", meeting)
    peers = [peer | Agent(other).call("join_meeting", meeting) for peer, other in zip(peers, others, strict=True)]
    return bound(replace(prepared, attempts=(replace(attempt, request={**attempt.request, "peers": peers}),)))


def check_free_gpus(devices: list[Mapping[str, Any]], problem: str, count: int, name: str) -> None:
    """Check that as many GPUs are free as the job needs. Raises NoCapacity; LaunchError: the host has too few."""
    if len(devices) < count:
        has = f"has {len(devices)} GPUs" if devices else f"has no usable GPU ({problem})"
        fix = f"Ask for fewer: --gpus {len(devices)}" if devices else "To run on its CPUs: --cpu"
        raise LaunchError(f"{name} {has}; the job needs {count}", fix)
    free = [gpu for gpu in devices if gpu["free"]]
    if len(free) < count:
        uses = "".join(f"\n  GPU {gpu['index']}: {used_by(gpu)}" for gpu in devices if not gpu["free"])
        hint = "Wait until they are free, or ask for fewer: --gpus N"
        raise NoCapacity(f"{len(free)} of {len(devices)} GPUs of {name} are free; the job needs {count}{uses}", hint)


def used_by(gpu: Mapping[str, Any]) -> str:
    """Return who uses a GPU."""
    return (
        f"run {gpu['run']}"
        if gpu["run"]
        else f"{', '.join(gpu['users']) or 'in use'} ({gpu['used_mb'] / 1024:.1f} GiB)"
    )


def gpus_text(devices: list[Mapping[str, Any]]) -> str:
    """Return `2 × NVIDIA L4`."""
    counts: dict[str, int] = {}
    for gpu in devices:
        counts[gpu["name"]] = counts.get(gpu["name"], 0) + 1
    return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "no GPU"

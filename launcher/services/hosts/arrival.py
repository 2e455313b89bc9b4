"""What is checked and sent when launch arrives at a host, before anything is started there."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from launcher.errors import LaunchError, NoCapacity, UsageError
from launcher.inputs.content import content
from launcher.plan.binding import bound
from launcher.remote.agent import PYTHONS, ROOT, Agent
from launcher.services.local.request import parse_request

if TYPE_CHECKING:
    from launcher.images.source_files import Source
    from launcher.plan.model import Plan
    from launcher.remote.connection import Connection

LEAST_GB: Final = 2.0
"""Free disk below which a checkpoint may not fit."""


def prepare_host(plan: Plan, source: Source, connection: Connection, say: Callable[[str], None]) -> Plan:
    """Check the host's GPUs, disk and Python, send the code unless it is there, and return the plan with the Python.

    Raises:
        NoCapacity: too few GPUs are free.
        LaunchError: the host can't run the job; the hint says how it can.
    """
    agent, name = Agent(connection), connection.host.name
    request = plan.attempts[0].request
    facts = agent.call("describe")
    check_free_gpus(facts["gpus"], str(facts["gpu_problem"]), plan.machine.gpus, name)
    if facts["free_gb"] < LEAST_GB:
        say(f"warning: {facts['free_gb']:.1f} GB are free on the disk of {name}:~/launch")
    python = find_host_python(connection, request["python"], with_torch=parse_request(request["job"]).uses_torch)
    say(f"{name}: {gpus_text(facts['gpus'])}, {python}")
    if code := request["code"]:
        files = [(f"workspace/{file.name}", file.path) for file in source.code]
        texts = {f"project/{path}": text for path, text in source.installed.items()}

        def check() -> None:
            if content(source.code).digest != source.digest:
                raise UsageError("the code changed while it was being sent", "Repeat the command.")

        connection.send(files, f"{ROOT}/code/{code}", texts=texts, check=check)
    attempt = replace(plan.attempts[0], request={**request, "python": python})
    return bound(replace(plan, attempts=(attempt,)))


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


def find_host_python(connection: Connection, named: str, *, with_torch: bool) -> str:
    """Return the path of the Python on the host that runs the job: the named one, or the first with PyTorch.

    Raises LaunchError: there is none.
    """
    path = f'"$HOME"/{shlex.quote(named[2:])}' if named.startswith("~/") else shlex.quote(named)
    candidates = (path,) if named else PYTHONS
    needs = ' and u.find_spec("torch")' if with_torch else ""
    test = f"import sys, importlib.util as u; sys.exit(not (sys.version_info >= (3, 10){needs}))"
    script = f"""
cd
for each in {" ".join(candidates)}; do
  if "$each" -c '{test}' 2>/dev/null; then command -v "$each"; exit 0; fi
done
"""
    if path := connection.run(script).decode().strip():
        return path
    name, ssh_text = connection.host.name, connection.host.ssh_text
    wanted = "Python 3.10 or later" + (" with PyTorch" if with_torch else "")
    if named:
        raise LaunchError(f"{named} on {name} is no {wanted}", f"Try: ssh {ssh_text} {named} -c 'import torch'")
    raise LaunchError(
        f"{name} has no {wanted} on its PATH or in /opt/conda, ~/.venv",
        "Name the one that has it: --python PATH; or make one:\n"
        f"ssh {ssh_text} 'python3 -m venv ~/.venv && \\\n"
        "    ~/.venv/bin/pip install torch numpy tensorboard psutil nvidia-ml-py'",
    )

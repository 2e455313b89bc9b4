"""What a request asks for, read back from it: of the plan's attempts and of jobs alike, of either service. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from types import ModuleType
from typing import Any

from launch_train.common import contract
from launcher.backend.request import vertex, vm
from launcher.backend.request.model import JobRequest
from launcher.diagnosis import Tried
from launcher.errors import JobFailed
from launcher.jobs.job import Job, command
from launcher.spec.models import BUILTIN, OLD_BUILTIN

LEAST_SECONDS = 180
"""The least of limits.hours that a spec may name: what is shorter than that goes by with starting."""
MOST_ENDED = 100
"""The newest of the jobs that have ended: a claim is most likely theirs."""
SHOWN = 100
"""Characters of a value in a comparison."""


def service(request: Mapping[str, Any]) -> ModuleType:
    """Who knows the request's shape."""
    return vertex if "jobSpec" in request else vm


def is_vm(request: Mapping[str, Any]) -> bool:
    """Whether it is one of Compute Engine's."""
    return service(request) is vm


def read(request: Mapping[str, Any]) -> JobRequest:
    """What it asks for."""
    found: JobRequest = service(request).read(request)
    return found


def tried(project: str, region: str, request: Mapping[str, Any], zone: str | None = None) -> Tried:
    """What was asked for, for causes and fixes: by an attempt of a plan, or by a job whose plan isn't known."""
    found = read(request)
    return Tried(
        project=project,
        region=region,
        zone=zone,
        provisioning=found.provisioning,
        machine_type=found.machine_type,
        gpus=found.gpus * found.nodes,
        account=found.account,
        image=found.image,
        output=found.output,
    )


def tried_by(job: Job, project: str) -> Tried:
    """What a job was asked for."""
    return tried(project, job.region, job.request, job.zone)


def within_hours(request: Mapping[str, Any], billed: float, run: str) -> Mapping[str, Any]:
    """The request with what is left of the run's hours: `limits.hours` is one budget over all attempts, of which jobs
    before this one have used up `billed` seconds. The first attempt's is the plan's own.

    Raises JobFailed: nothing worth a start is left; the run has expired, whether in a job or between two.
    """
    whole = service(request).limit(request)
    if billed < 1 or not whole:
        return request
    left = whole - ceil(billed)
    if left < LEAST_SECONDS:
        used, hours = billed / 3600, whole / 3600
        raise JobFailed(
            f"run {run} has used up its hours: {used:.2f} of limits.hours {hours:g}",
            f"Give it more: {command(vm=is_vm(request))} --resume {run} --hours {ceil(used) + max(1, round(hours))}",
        )
    shorter: Mapping[str, Any] = service(request).with_limit(request, left)
    return shorter


def within_wait(request: Mapping[str, Any], left: float | None) -> Mapping[str, Any]:
    """The request with no longer a wait for machines than what is `left` of `limits.wait_total`, in seconds; only
    flex-start requests name one."""
    own = service(request).wait(request)
    if left is None or not own or own <= left:
        return request
    shorter: Mapping[str, Any] = service(request).with_wait(request, int(left))
    return shorter


def beside_ended(request: Mapping[str, Any], ended: Sequence[str]) -> Mapping[str, Any]:
    """The request of a launch that could write no lock: it says which jobs of the run have ended (contract.ENDED)."""
    changed_request: Mapping[str, Any] = service(request).with_env(
        request, contract.ENDED, json.dumps(ended[:MOST_ENDED])
    )
    return changed_request


def provisioning(request: Mapping[str, Any]) -> str:
    """The provisioning model, as the plan calls it."""
    return read(request).provisioning


def machine_type(request: Mapping[str, Any]) -> str:
    """Of the primary node; empty if none is named."""
    return read(request).machine_type


def image(request: Mapping[str, Any]) -> str:
    """The container image of the primary node."""
    return read(request).image


def labels(request: Mapping[str, Any]) -> Mapping[str, str]:
    """Its labels."""
    found: Mapping[str, str] = (vm.properties(request) if is_vm(request) else request).get("labels", {})
    return found


def run_folder(request: Mapping[str, Any]) -> str | None:
    """Where it writes: as its environment says, else its base directory; None when it doesn't say."""
    found = read(request)
    return (found.env.get(contract.RUN_FOLDER, "") or found.output).rstrip("/") or None


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    fields: Callable[[Mapping[str, Any]], dict[str, str]] | None = None,
) -> tuple[str, ...]:
    """Return a line for each difference in what two requests compute, or in `fields`: `env.SEED: 1 → 2`.

    Where a job runs, its limits and its labels don't count: the same run may be tried elsewhere.
    """
    before, after = map(fields or computed, (old, new))
    names = [*before, *(name for name in after if name not in before)]
    return tuple(
        f"{name}: {shown(before.get(name))} → {shown(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    )


def computed(request: Mapping[str, Any]) -> dict[str, str]:
    """What is computed, field by field."""
    read_back = read(request)
    output = run_folder(request) or ""
    found = {
        "command": " ".join(renamed(read_back.words)),
        "gpus": str(read_back.gpus),
        "nodes": str(read_back.nodes),
        "output": output.rpartition("/")[0] or output,
    }
    for name, value in read_back.env.items():
        if name == contract.CONFIG:
            found |= config(value)
        elif name == contract.SECRETS or not name.startswith("LAUNCH_"):  # the rest follows from other fields
            found[f"env.{name}"] = value
    return found


OLD_NODE, NODE = "train.node", "launch_train.node"


def renamed(words: Sequence[str]) -> list[str]:
    """Return a command with the present name of launch_train, which older requests call `train`."""
    return with_package(words, {OLD_NODE: NODE}, OLD_BUILTIN, BUILTIN)


def for_image_of(request: Mapping[str, Any], first: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request with the package's name as in the request `first`, whose image it shall run in."""
    if OLD_NODE not in read(first).words[:3]:
        return request
    changed: Mapping[str, Any] = service(request).with_commands(
        request, lambda words: with_package(words, {NODE: OLD_NODE}, BUILTIN, OLD_BUILTIN)
    )
    return changed


def with_package(words: Sequence[str], nodes: Mapping[str, str], old: str, new: str) -> list[str]:
    """Return a node's command line with another name of the package: of the node itself and in its option --module."""
    if not any(word in nodes for word in words[:3]):
        return list(words)
    own = words.index("--") if "--" in words else len(words)
    module = words.index("--module") + 1 if "--module" in words[:own] else None
    return [
        re.sub(rf"^{old}(?=\.|$)", new, word) if at == module else nodes.get(word, word) if at < own else word
        for at, word in enumerate(words)
    ]


def submitted(request: Mapping[str, Any]) -> dict[str, str]:
    """Return what is computed, with the account and the image."""
    found = read(request)
    return {"serviceAccount": found.account, "image": found.image, **computed(request)}


def config(text: str) -> dict[str, str]:
    """run.config's values by their dotted names; as one text where it isn't JSON."""
    try:
        return dict(flat("run.config", json.loads(text)))
    except ValueError:
        return {"run.config": text}


def flat(name: str, value: Any) -> list[tuple[str, str]]:
    """Nested data as dotted names and their values."""
    if isinstance(value, dict) and value:
        return [pair for key, each in value.items() for pair in flat(f"{name}.{key}", each)]
    return [(name, json.dumps(value, ensure_ascii=False))]


def shown(value: str | None) -> str:
    """A value in a line; one that isn't there says so."""
    if value is None:
        return "(none)"
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}…"

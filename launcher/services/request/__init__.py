"""Parse the requests of all services: those in a plan's attempts and those of existing jobs. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from types import ModuleType
from typing import Any

from launch_train.common import contract
from launcher.diagnosis import RequestContext
from launcher.errors import JobFailed
from launcher.jobs.job import LOCAL, Job, command
from launcher.services.request import host, local, vertex, vm
from launcher.services.request.model import JobRequest

LEAST_SECONDS = 180
"""The minimum of limits.hours, in seconds. Anything shorter is used up by the start."""
MOST_ENDED = 100
"""Maximum number of ended jobs that are listed, newest first. A stale claim most likely belongs to one of them."""
SHOWN = 100
"""The maximum length of a value in a comparison, in characters."""


def service(request: Mapping[str, Any]) -> ModuleType:
    if "jobSpec" in request:
        return vertex
    if "host" in request:
        return host
    return local if request.get("region") == LOCAL else vm


def is_vm(request: Mapping[str, Any]) -> bool:
    """Return whether the request is for Compute Engine."""
    return service(request) is vm


def read(request: Mapping[str, Any]) -> JobRequest:
    parsed: JobRequest = service(request).read(request)
    return parsed


def request_context(project: str, region: str, request: Mapping[str, Any], zone: str | None = None) -> RequestContext:
    """Return a request's properties for causes and fixes: of a plan's attempt, or of a job without a known plan."""
    parsed = read(request)
    return RequestContext(
        project=project,
        region=region,
        zone=zone,
        provisioning=parsed.provisioning,
        machine_type=parsed.machine_type,
        gpus=parsed.gpus * parsed.nodes,
        account=parsed.account,
        image=parsed.image,
        output=parsed.output,
    )


def context_of_job(job: Job, project: str) -> RequestContext:
    """Return the properties of a job's request for error causes and fixes."""
    return request_context(project, job.region, job.request, job.zone)


def within_hours(request: Mapping[str, Any], billed: float, run: str) -> Mapping[str, Any]:
    """Return the request with its time limit reduced by `billed`, the seconds that earlier jobs of the run have used.

    `limits.hours` is one budget over all attempts. The first attempt keeps the plan's limit.

    Raises JobFailed: the remaining time is too short for another start, so the run has expired.
    """
    whole = service(request).limit(request)
    if billed < 1 or not whole:
        return request
    left = whole - ceil(billed)
    if left < LEAST_SECONDS:
        used, hours = billed / 3600, whole / 3600
        raise JobFailed(
            f"run {run} has used up its hours: {used:.2f} of limits.hours {hours:g}",
            f"To allow more: {command(vm=is_vm(request))} --resume {run} --hours {ceil(used) + max(1, round(hours))}",
        )
    shorter: Mapping[str, Any] = service(request).with_limit(request, left)
    return shorter


def until(request: Mapping[str, Any], left: float) -> Mapping[str, Any]:
    """Return the request with its time limit reduced to `left`, the seconds until its reservation ends."""
    if service(request).limit(request) <= left:
        return request
    shorter: Mapping[str, Any] = service(request).with_limit(request, max(LEAST_SECONDS, int(left)))
    return shorter


def within_wait(request: Mapping[str, Any], left: float | None) -> Mapping[str, Any]:
    """Return the request with its wait for machines reduced to `left`, the remaining seconds of `limits.wait_total`.

    Only flex-start requests have such a wait.
    """
    own = service(request).wait(request)
    if left is None or not own or own <= left:
        return request
    shorter: Mapping[str, Any] = service(request).with_wait(request, int(left))
    return shorter


def beside_ended(request: Mapping[str, Any], ended: Sequence[str]) -> Mapping[str, Any]:
    """Return the request with the run's ended jobs (contract.ENDED), for a launch that could not write a lock."""
    changed_request: Mapping[str, Any] = service(request).with_env(
        request, contract.ENDED, json.dumps(ended[:MOST_ENDED])
    )
    return changed_request


def gpu(request: Mapping[str, Any]) -> str:
    """Return the kind of GPU that the request was made for, such as l4. Empty: unknown."""
    try:
        return str(json.loads(read(request).env[contract.GPU])["name"])
    except (KeyError, TypeError, ValueError):
        return ""


def labels(request: Mapping[str, Any]) -> Mapping[str, str]:
    own_labels: Mapping[str, str] = (vm.properties(request) if is_vm(request) else request).get("labels", {})
    return own_labels


def run_folder(request: Mapping[str, Any]) -> str | None:
    """Return the run folder from the environment, or else the base output directory. None if it has neither."""
    parsed = read(request)
    folder = (parsed.env.get(contract.RUN_FOLDER, "") or parsed.output).rstrip("/") or None
    if folder and "host" in request and not folder.startswith("gs://"):
        return f"ssh://{request['host']}/{folder.lstrip('/')}"
    return folder


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    fields: Callable[[Mapping[str, Any]], dict[str, str]] | None = None,
) -> tuple[str, ...]:
    """Return a line for each difference in what two requests compute, or in `fields`: `env.SEED: 1 → 2`.

    The place, the limits and the labels are ignored, because they do not change the computation.
    """
    before, after = map(fields or computed, (old, new))
    names = [*before, *(name for name in after if name not in before)]
    return tuple(
        f"{name}: {shown(before.get(name))} → {shown(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    )


def computed(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that define the computation."""
    read_back = read(request)
    output = run_folder(request) or ""
    fields = {
        "command": " ".join(read_back.words),
        "gpus": str(read_back.gpus),
        "nodes": str(read_back.nodes),
        "output": output.rpartition("/")[0] or output,
    }
    for name, value in read_back.env.items():
        if name == contract.CONFIG:
            fields |= config(value)
        elif name == contract.SECRETS or not name.startswith("LAUNCH_"):  # the others are derived
            fields[f"env.{name}"] = value
    return fields


def submitted(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that define the computation, and the account and the image."""
    parsed = read(request)
    return {"serviceAccount": parsed.account, "image": parsed.image, **computed(request)}


def config(text: str) -> dict[str, str]:
    """Return run.config's values by their dotted names. Text that is not JSON becomes one value."""
    try:
        return dict(flat("run.config", json.loads(text)))
    except ValueError:
        return {"run.config": text}


def flat(name: str, value: Any) -> list[tuple[str, str]]:
    """Flatten nested data to dotted names and values."""
    if isinstance(value, dict) and value:
        return [pair for key, each in value.items() for pair in flat(f"{name}.{key}", each)]
    return [(name, json.dumps(value, ensure_ascii=False))]


def shown(value: str | None) -> str:
    """Format a value for one line. None becomes "(none)"."""
    if value is None:
        return "(none)"
    return value if len(value) <= SHOWN else f"{value[:SHOWN]}…"

"""What a Vertex request asks for, read back from it: of the plan's attempts and of jobs alike. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from launcher.errors import JobFailed
from launcher.verdicts import Tried
from train import contract

STRATEGIES = {"SPOT": "spot", "FLEX_START": "flex-start"}
LEAST_SECONDS = 180
"""The least of limits.hours that a spec may name: what is shorter than that goes by with starting."""
MOST_ENDED = 100
"""The newest of the jobs that have ended: a claim is most likely theirs."""
SHOWN = 100
"""Characters of a value in a comparison."""


def tried(project: str, region: str, request: Mapping[str, Any]) -> Tried:
    """What was asked for, for causes and fixes: by an attempt of a plan, or by a job whose plan isn't known."""
    job = request.get("jobSpec", {})
    machine, pools = first_pool(request).get("machineSpec", {}), job.get("workerPoolSpecs", ())
    return Tried(
        project=project,
        region=region,
        provisioning=provisioning(request),
        machine_type=machine_type(request),
        gpus=int(machine.get("acceleratorCount", 0)) * sum(int(pool.get("replicaCount", 0)) for pool in pools[:2]),
        account=job.get("serviceAccount", ""),
        image=image(request),
        output=job.get("baseOutputDirectory", {}).get("outputUriPrefix", ""),
    )


def within_hours(request: Mapping[str, Any], billed: float, run: str) -> Mapping[str, Any]:
    """The request with what is left of the run's hours: `limits.hours` is one budget over all attempts, of which jobs
    before this one have used up `billed` seconds. The first attempt's is the plan's own.

    Raises JobFailed: nothing worth a start is left; the run has expired, whether in a job or between two.
    """
    scheduling = request.get("jobSpec", {}).get("scheduling", {})
    whole = int(str(scheduling.get("timeout", "0s")).removesuffix("s"))
    if billed < 1 or not whole:
        return request
    left = whole - ceil(billed)
    if left < LEAST_SECONDS:
        used, hours = billed / 3600, whole / 3600
        raise JobFailed(
            f"run {run} has used up its hours: {used:.2f} of limits.hours {hours:g}",
            f"Give it more: launch vertex SPEC --resume {run} --hours {ceil(used) + max(1, round(hours))}",
        )
    return {**request, "jobSpec": {**request["jobSpec"], "scheduling": {**scheduling, "timeout": f"{left}s"}}}


def beside_ended(request: Mapping[str, Any], ended: Sequence[str]) -> Mapping[str, Any]:
    """The request of a launch that could write no lock: it says which jobs of the run have ended (contract.ENDED)."""
    told = {"name": contract.ENDED, "value": json.dumps(ended[:MOST_ENDED])}

    def pool(one: Mapping[str, Any]) -> Mapping[str, Any]:
        container = one.get("containerSpec")
        return {**one, "containerSpec": {**container, "env": [*container.get("env", ()), told]}} if container else one

    spec = request["jobSpec"]
    return {**request, "jobSpec": {**spec, "workerPoolSpecs": list(map(pool, spec["workerPoolSpecs"]))}}


def provisioning(request: Mapping[str, Any]) -> str:
    """The provisioning model, as the plan calls it."""
    affinity = first_pool(request).get("machineSpec", {}).get("reservationAffinity", {})
    if affinity.get("values"):
        return f"reservation:{affinity['values'][0]}"
    strategy = request.get("jobSpec", {}).get("scheduling", {}).get("strategy", "")
    return STRATEGIES.get(strategy, "standard")


def machine_type(request: Mapping[str, Any]) -> str:
    """Of the primary node; empty if none is named."""
    return str(first_pool(request).get("machineSpec", {}).get("machineType", ""))


def image(request: Mapping[str, Any]) -> str:
    """The container image of the primary node."""
    return str(first_pool(request).get("containerSpec", {}).get("imageUri", ""))


def first_pool(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The primary node's worker pool; empty if there is none."""
    pools = request.get("jobSpec", {}).get("workerPoolSpecs") or [{}]
    found: Mapping[str, Any] = pools[0]
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """In what two requests compute something else, a line each: `env.SEED: 1 → 2`.

    Where a job runs, its limits and its labels don't count: the same run may be tried elsewhere.
    """
    before, after = computed(old), computed(new)
    names = [*before, *(name for name in after if name not in before)]
    return tuple(
        f"{name}: {shown(before.get(name))} → {shown(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    )


def computed(request: Mapping[str, Any]) -> dict[str, str]:
    """What is computed, field by field."""
    pools = request.get("jobSpec", {}).get("workerPoolSpecs") or [{}]
    container = pools[0].get("containerSpec", {})
    output = request.get("jobSpec", {}).get("baseOutputDirectory", {}).get("outputUriPrefix", "")
    found = {
        "command": " ".join([*container.get("command", []), *container.get("args", [])]),
        "gpus": str(pools[0].get("machineSpec", {}).get("acceleratorCount", 0)),
        "nodes": str(sum(int(pool.get("replicaCount", 0)) for pool in pools if "containerSpec" in pool)),
        "output": output.rpartition("/")[0] or output,
    }
    for entry in container.get("env", []):
        name, value = entry.get("name", ""), entry.get("value", "")
        if name == contract.CONFIG:
            found |= config(value)
        elif name == contract.SECRETS or not name.startswith("LAUNCH_"):  # the rest follows from other fields
            found[f"env.{name}"] = value
    return found


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

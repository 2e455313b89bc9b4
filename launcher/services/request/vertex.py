"""Parse and edit a CustomJob's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.services.request.model import JobRequest

STRATEGIES = {"SPOT": "spot", "FLEX_START": "flex-start"}


def read(request: Mapping[str, Any]) -> JobRequest:
    job = request.get("jobSpec", {})
    pools, first = job.get("workerPoolSpecs", ()), first_pool(request)
    machine, container = first.get("machineSpec", {}), first.get("containerSpec", {})
    return JobRequest(
        provisioning=provisioning(request),
        machine_type=str(machine.get("machineType", "")),
        gpus=int(machine.get("acceleratorCount", 0)),
        nodes=sum(int(pool.get("replicaCount", 0)) for pool in pools[:2]),
        account=job.get("serviceAccount", ""),
        image=str(container.get("imageUri", "")),
        output=job.get("baseOutputDirectory", {}).get("outputUriPrefix", ""),
        words=(*container.get("command", ()), *container.get("args", ())),
        env={entry.get("name", ""): entry.get("value", "") for entry in container.get("env", ())},
    )


def provisioning(request: Mapping[str, Any]) -> str:
    """Return the provisioning model by the plan's name for it."""
    affinity = first_pool(request).get("machineSpec", {}).get("reservationAffinity", {})
    if affinity.get("values"):
        return f"reservation:{affinity['values'][0]}"
    strategy = request.get("jobSpec", {}).get("scheduling", {}).get("strategy", "")
    return STRATEGIES.get(strategy, "standard")


def first_pool(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the primary node's worker pool. Empty if there is none."""
    pools = request.get("jobSpec", {}).get("workerPoolSpecs") or [{}]
    pool: Mapping[str, Any] = pools[0]
    return pool


def limit(request: Mapping[str, Any]) -> int:
    """Return the job's time limit in seconds, or 0 if it has none."""
    scheduling = request.get("jobSpec", {}).get("scheduling", {})
    return int(str(scheduling.get("timeout", "0s")).removesuffix("s"))


def with_limit(request: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    spec = request["jobSpec"]
    return {**request, "jobSpec": {**spec, "scheduling": {**spec["scheduling"], "timeout": f"{seconds}s"}}}


def wait(request: Mapping[str, Any]) -> int:
    """Return how long the job may wait for machines, in seconds, or 0 if it has no limit."""
    scheduling = request.get("jobSpec", {}).get("scheduling", {})
    return int(str(scheduling.get("maxWaitDuration", "0s")).removesuffix("s"))


def with_wait(request: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    """Return the request with another limit on the wait for machines."""
    spec = request["jobSpec"]
    return {**request, "jobSpec": {**spec, "scheduling": {**spec["scheduling"], "maxWaitDuration": f"{seconds}s"}}}


def with_env(request: Mapping[str, Any], name: str, value: str) -> Mapping[str, Any]:
    """Return the request with one more environment variable in every container."""
    variable = {"name": name, "value": value}

    def pool(pool_spec: Mapping[str, Any]) -> Mapping[str, Any]:
        container = pool_spec.get("containerSpec")
        return (
            {**pool_spec, "containerSpec": {**container, "env": [*container.get("env", ()), variable]}}
            if container
            else pool_spec
        )

    spec = request["jobSpec"]
    return {**request, "jobSpec": {**spec, "workerPoolSpecs": list(map(pool, spec["workerPoolSpecs"]))}}

"""A job's request in a few words."""

from __future__ import annotations

from typing import Any

from launcher import asked
from launcher.jobs import Job
from train import contract


def pools_of(job: Job) -> list[dict[str, Any]]:
    """The worker pools as they were asked for."""
    return list(job.request.get("jobSpec", {}).get("workerPoolSpecs", ()))


def provisioning_of(job: Job) -> str:
    """`standard`, `spot`, `flex-start` or `reservation`."""
    return asked.provisioning(job.request).partition(":")[0]


def machine_of(job: Job) -> str:
    """`2 × a3-highgpu-8g`; without a number for one."""
    pools = pools_of(job)[:2]
    nodes = sum(int(pool.get("replicaCount", 1)) for pool in pools)
    name = asked.machine_type(job.request) or "a machine"
    return f"{nodes} × {name}" if nodes > 1 else name


def image_of(job: Job) -> str:
    """The first pool's image."""
    return asked.image(job.request)


def run_folder_of(job: Job) -> str | None:
    """Where it writes, from its environment; else its base directory; None when it doesn't say."""
    for pool in pools_of(job)[:1]:
        for entry in pool.get("containerSpec", {}).get("env", ()):
            if entry.get("name") == contract.RUN_FOLDER and entry.get("value"):
                return str(entry["value"]).rstrip("/")
    base = job.request.get("jobSpec", {}).get("baseOutputDirectory", {}).get("outputUriPrefix", "")
    return base.rstrip("/") or None

"""Add the batch script to the plan of a job on a host, which queues it in Slurm. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from launcher.errors import PlanRefused
from launcher.plan.binding import bound
from launcher.plan.model import Plan
from launcher.spec.models import Slurm

NOTICE_SECONDS: Final = 90
"""Time between the signal to save and the end of a Slurm job: saving takes up to 30 s, and Slurm may be 60 s late."""
END_MINUTES: Final = 10
"""Slurm's time limit is later than limits.hours, at which launch ends the run itself."""


def on_slurm(plan: Plan, settings: Slurm, gpu: str) -> Plan:
    """Return the plan of a job on a host (`on_host`) for the Slurm there. `gpu`: the catalog's name of the GPU.

    Raises PlanRefused: the job needs secrets.
    """
    if plan.spec.get("secrets") or (plan.spec.get("notify") or {}).get("webhook", "").startswith("projects/"):
        raise PlanRefused(
            "a job in Slurm gets no secrets: Slurm stores a job's data on a disk",
            "Remove them, and let the program read a file on the cluster.",
            field="secrets" if plan.spec.get("secrets") else "notify.webhook",
        )
    attempt = plan.attempts[0]
    script = "\n".join(script_lines(plan, settings, gpu)) + "\n"
    return bound(replace(plan, attempts=(replace(attempt, request={**attempt.request, "script": script}),)))


def script_lines(plan: Plan, settings: Slurm, gpu: str) -> Iterator[str]:
    """Yield the batch script. Its argument is the job's folder, which is on a disk that all nodes share.

    Without GPUs it has no option for them, such as --cpus-per-gpu: srun would refuse to start the nodes.
    """
    minutes = math.ceil(plan.limits.hours * 60) + END_MINUTES
    if settings.hours is not None:
        minutes = min(minutes, math.floor(settings.hours * 60))
    name = (gpu.partition("-")[0] if settings.gpu_type is None else settings.gpu_type) or ""
    options = {
        "--job-name": f"launch-{plan.run}",
        "--dependency": "singleton",  # Slurm runs no two jobs of a run at once, even if an answer was lost
        "--nodes": plan.machine.nodes,
        "--ntasks-per-node": 1,
        "--gpus-per-node": ":".join(filter(None, (name, str(plan.machine.gpus)))) if plan.machine.gpus else None,
        "--time": minutes,
        "--partition": settings.partition,
        "--account": settings.account,
        "--open-mode": "append",
        "--signal": f"B:USR1@{NOTICE_SECONDS}",
    }
    yield "#!/bin/bash"
    yield from (f"#SBATCH {option}={value}" for option, value in options.items() if value is not None)
    yield "#SBATCH --requeue"
    yield from (f"#SBATCH {option}" for option in settings.options if plan.machine.gpus or "-gpu" not in option)
    yield 'exec "$1/run" batch'

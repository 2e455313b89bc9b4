"""Replace a plan's GPU machine by one without GPUs, for `launch selftest`: the cheapest job that covers every stage."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from launch_train.common import contract
from launcher.plan.model import Attempt, Plan


def on_cpu(plan: Plan, machine_type: str) -> Plan:
    """Return a Vertex AI plan with `machine_type` (n1-standard-4) instead of its GPU machine.

    The catalog has no prices of machines without GPUs. The GPU machine's price remains, as an upper bound: that is a
    machine like this one plus a GPU.
    """
    machine = replace(plan.machine, machine_type=machine_type, gpu="no GPU", gpus=0, gpu_memory_gb=None)
    machine = replace(machine, vcpus=None, memory_gb=None)
    return replace(plan, machine=machine, attempts=tuple(attempt(planned, machine_type) for planned in plan.attempts))


def attempt(planned: Attempt, machine_type: str) -> Attempt:
    """Return an attempt without its GPUs."""
    rule = f"at most that of {planned.machine_type} ({planned.usd_rule})"
    return replace(
        planned, machine_type=machine_type, usd_approx=True, usd_rule=rule, request=request(planned, machine_type)
    )


def request(attempt: Attempt, machine_type: str) -> dict[str, Any]:
    """Return the CustomJob without GPUs, and without the variable that tells its node to expect one."""
    spec = attempt.request["jobSpec"]
    pools = [
        {
            **pool,
            "machineSpec": {"machineType": machine_type},
            "containerSpec": {
                **pool["containerSpec"],
                "env": [entry for entry in pool["containerSpec"]["env"] if entry["name"] != contract.GPU],
            },
        }
        for pool in spec["workerPoolSpecs"]
    ]
    return {**attempt.request, "jobSpec": {**spec, "workerPoolSpecs": pools}}

"""Replace a plan's GPU machine by one without GPUs, for `launch selftest`: the cheapest job that covers every stage."""

from __future__ import annotations

from msgspec.structs import replace

from launch_train.common import contract
from launcher.plan.model import Plan


def on_cpu(plan: Plan, machine_type: str) -> Plan:
    """Return a Vertex AI plan with `machine_type` (n1-standard-4) instead of its GPU machine.

    The catalog has no prices of machines without GPUs. The GPU machine's price remains, as an upper bound: that is a
    machine like this one plus a GPU.
    """
    machine = replace(plan.machine, machine_type=machine_type, gpu="no GPU", gpus=0, gpu_memory_gb=None)
    attempts = []
    for attempt in plan.attempts:
        job = attempt.request["jobSpec"]
        pools = [
            {
                **pool,
                "machineSpec": {"machineType": machine_type},
                "containerSpec": {
                    **pool["containerSpec"],
                    "env": [entry for entry in pool["containerSpec"]["env"] if entry["name"] != contract.GPU],
                },
            }
            for pool in job["workerPoolSpecs"]
        ]
        request = {**attempt.request, "jobSpec": {**job, "workerPoolSpecs": pools}}
        rule = f"at most that of {attempt.machine_type} ({attempt.usd_rule})"
        attempts.append(replace(attempt, machine_type=machine_type, usd_approx=True, usd_rule=rule, request=request))
    machine = replace(machine, vcpus=None, memory_gb=None)
    return replace(plan, machine=machine, attempts=tuple(attempts))

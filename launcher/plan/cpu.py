"""A plan's machine without GPUs, for `launch selftest`: the cheapest job that shows that the whole chain works."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from launcher.plan.model import Attempt, Plan
from train import contract


def on_cpu(made: Plan, machine_type: str) -> Plan:
    """The plan of a job on Vertex AI with `machine_type` (n1-standard-4) in place of its GPU machine.

    The catalog has no prices of machines without GPUs. The GPU machine's stays, as an upper bound: it is such a machine
    and a GPU.
    """
    machine = replace(made.machine, machine_type=machine_type, gpu="no GPU", gpus=0, gpu_memory_gb=None)
    machine = replace(machine, vcpus=None, memory_gb=None)
    return replace(made, machine=machine, attempts=tuple(attempt(one, machine_type) for one in made.attempts))


def attempt(one: Attempt, machine_type: str) -> Attempt:
    """One attempt without its GPUs."""
    rule = f"at most that of {one.machine_type} ({one.usd_rule})"
    return replace(one, machine_type=machine_type, usd_approx=True, usd_rule=rule, request=request(one, machine_type))


def request(one: Attempt, machine_type: str) -> dict[str, Any]:
    """The CustomJob. Its node isn't told of a GPU, which it would look for."""
    spec = one.request["jobSpec"]
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
    return {**one.request, "jobSpec": {**spec, "workerPoolSpecs": pools}}

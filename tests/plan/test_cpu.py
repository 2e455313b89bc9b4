"""A plan's machine without GPUs."""

from __future__ import annotations

from launch_train.common import contract
from launcher.plan.cpu import on_cpu
from launcher.testing.googlecloud import parse_custom_job
from tests.plan.planning import env_of, planned


def test_the_request_has_no_gpu_and_its_node_looks_for_none() -> None:
    made = planned(machine={"type": "g2-standard-4"}, provisioning=["standard"])
    plan = on_cpu(made, "n1-standard-4")
    (before,), (after,) = made.attempts, plan.attempts
    (pool,) = parse_custom_job(after.request).job_spec.worker_pool_specs
    assert (pool.machine_spec.machine_type, pool.machine_spec.accelerator_count) == ("n1-standard-4", 0)
    assert contract.GPU in env_of(before.request)
    assert env_of(after.request) == {k: v for k, v in env_of(before.request).items() if k != contract.GPU}
    assert (after.machine_type, plan.machine.gpus, plan.run) == ("n1-standard-4", 0, made.run)


def test_the_gpu_machines_price_is_its_upper_bound() -> None:
    made = planned(machine={"type": "g2-standard-4"}, provisioning=["standard"])
    plan = on_cpu(made, "n1-standard-4")
    (before,), (after,) = made.attempts, plan.attempts
    assert (after.usd_per_hour, after.usd_approx) == (before.usd_per_hour, True)
    assert after.usd_rule.startswith("at most that of g2-standard-4")
    assert plan.limits == made.limits

"""Several machine types in one spec: each has its machine, memory, price and request, in one fallback order."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import msgspec
import pytest

from launch_train.common import contract
from launcher.cli.ui.plan_page import plan_lines
from launcher.errors import PlanRefused
from launcher.plan.binding import read
from launcher.plan.build import image
from launcher.plan.changes import compare_plans
from launcher.plan.model import Plan
from tests.plan.planning import CATALOG, context, env_of, planned, spec

H100, A100 = {"type": "h100", "gpus": 1}, {"type": "a100-80gb", "gpus": 1}
TYPES: dict[str, Any] = {"type": ["h100", "a100-80gb"], "gpus": 1}
TRAINER: dict[str, Any] = {"config": {"model": {"name": "gpt2-124m"}, "steps": 20_000, "batch_size": 64}}
LARGE = {"config": {"model": {"name": "gpt2-xl"}, "steps": 1000, "batch_size": 8}}


def tried(plan: Plan) -> list[tuple[str, str, str]]:
    return [(one.machine_type, one.provisioning, one.region) for one in plan.attempts]


def refused(**fields: Any) -> PlanRefused:
    with pytest.raises(PlanRefused) as caught:
        planned(**fields)
    return caught.value


def test_each_attempt_has_the_request_price_and_figures_of_its_machine() -> None:
    plan = planned(machine=TYPES, regions="any", run=TRAINER)
    alone = [planned(machine=machine, regions="any", run=TRAINER) for machine in (H100, A100)]
    expected = {place: one for each in alone for place, one in zip(tried(each), each.attempts, strict=True)}
    assert {*tried(plan)} == expected.keys()
    for attempt in plan.attempts:
        own = expected[attempt.machine_type, attempt.provisioning, attempt.region]
        assert comparable(attempt.request) == comparable(own.request)
        assert (attempt.usd_per_hour, attempt.usd_ceiling) == (own.usd_per_hour, own.usd_ceiling)
        assert plan.machine_of(attempt).machine_type == attempt.machine_type
    assert plan.machine == plan.machine_of(plan.attempts[0])
    assert {machine.gpu for machine in plan.machines} == {"NVIDIA H100 80GB", "NVIDIA A100 80GB"}
    names = {json.loads(env_of(one.request)[contract.GPU])["name"] for one in plan.attempts}
    assert names == {"h100", "a100-80gb"}


def comparable(request: dict[str, Any]) -> dict[str, Any]:
    """The request without the digests of the spec and the plan, and without the mean time between interruptions, which
    is that of the worst attempt."""
    request = {name: value for name, value in request.items() if name != "labels"}
    env = env_of(request)
    return {**request, "jobSpec": None, "env": {name: env[name] for name in env if name != contract.MTBF}} | {
        "machine": request["jobSpec"]["workerPoolSpecs"][0]["machineSpec"],
        "scheduling": request["jobSpec"]["scheduling"],
    }


def test_the_run_is_that_of_a_single_type() -> None:
    one, several = planned(machine={"type": "h100", "gpus": 1}), planned(machine=TYPES)
    assert (several.run, several.image) == (one.run, one.image)
    assert planned(machine={"type": ["h100"], "gpus": 1}).attempts[0].machine is msgspec.UNSET
    assert several.attempts[0].request["labels"]["launch-spec"] != one.attempts[0].request["labels"]["launch-spec"]


def test_without_lists_the_cheapest_attempt_for_the_work_comes_first() -> None:
    """The L4's and the H100's attempts are merged: an hour of an H100 costs more, and its work takes less."""
    run = {"config": {**TRAINER["config"], "steps": 2000}}
    plan = planned(machine={"type": ["h100", "l4"], "gpus": 1}, regions="any", run=run)
    singles = [planned(machine={"type": name, "gpus": 1}, regions="any", run=run) for name in ("h100", "l4")]
    hours = {one.machine.machine_type: one.limits.hours_expected for one in singles}
    spot, others = 1 + 0.25 / 160, 1 + 0.25 / 3692
    costs = []
    for attempt in plan.attempts:
        training = hours[attempt.machine_type]
        assert training is not None
        if attempt.usd_per_hour is not None and not attempt.usd_is_bound:
            lost = spot if attempt.provisioning == "spot" else others
            costs.append(attempt.usd_per_hour * lost * (1 / 6 + training))
    assert costs == sorted(costs)
    kinds = [attempt.machine_type for attempt in plan.attempts]
    assert len([*groupby(kinds)]) > 2


def test_where_no_duration_is_known_the_peak_counts() -> None:
    """An A100 costs less per hour, but more for what an H100 does in that hour: 3.2 times as much."""
    first, *others = planned(machine={"type": ["a100-80gb", "h100"], "gpus": 1}).attempts
    assert first.machine_type == "a3-highgpu-1g"
    (a100,) = [one for one in others if one.machine_type == "a2-ultragpu-1g"]
    assert (a100.usd_per_hour or 0) < (first.usd_per_hour or 0) < 989 / 312 * (a100.usd_per_hour or 0)


def test_lists_of_the_spec_keep_their_order() -> None:
    plan = planned(machine=TYPES, provisioning=["standard", "spot"], regions=["us-east5", "us-central1"], run=TRAINER)
    places = [(one.provisioning, one.region) for one in plan.attempts if one.machine_type == "a2-ultragpu-1g"]
    assert places == [(model, where) for model in ("standard", "spot") for where in ("us-east5", "us-central1")]
    models = [one.provisioning for one in plan.attempts]
    assert models == sorted(models, key=["standard", "spot"].index)


def test_a_type_that_does_not_fit_is_named_and_not_tried() -> None:
    plan = planned(machine={"type": ["l4", "h100"], "gpus": 1}, run=LARGE)
    assert {one.machine_type for one in plan.attempts} == {"a3-highgpu-1g"}
    (warning,) = [text for text in plan.warnings if text.startswith("machine.type: skipped: l4 (g2-standard-12): ")]
    assert "needs" in warning
    assert "24 GB" in warning


def test_if_none_fits_every_reason_is_given() -> None:
    error = refused(machine={"type": ["l4", "t4"], "gpus": 1}, run=LARGE)
    assert error.problem.startswith("machine.type: no type can run this job:\n")
    assert "l4 (g2-standard-12): " in error.problem
    assert "t4 (n1-standard-8): " in error.problem
    assert error.hint


def test_a_type_that_is_not_in_the_region_is_named_and_not_tried() -> None:
    plan = planned(machine={"type": ["a100-80gb", "h100"], "gpus": 1}, regions=["us-west1"])
    assert {one.machine_type for one in plan.attempts} == {"a3-highgpu-1g"}
    assert any("a2-ultragpu-1g is not available in us-west1" in text for text in plan.warnings)


def test_a_region_may_have_some_of_the_types_but_not_none() -> None:
    machine = {"type": ["a100-80gb", "h100"], "gpus": 1}
    plan = planned(machine=machine, regions=["us-west1", "us-central1"], provisioning=["spot"])
    assert tried(plan) == [
        ("a3-highgpu-1g", "spot", "us-west1"),
        ("a3-highgpu-1g", "spot", "us-central1"),
        ("a2-ultragpu-1g", "spot", "us-central1"),
    ]
    assert not any("not tried" in text for text in plan.warnings)
    error = refused(machine=machine, regions=["us-central1", "me-central1"])
    assert (error.problem, error.field) == ("no type of machine.type can be used in me-central1", "regions.1")
    assert refused(machine=machine, regions=["us-central1", "us-cental1"]).problem.endswith(
        "not available in us-cental1"
    )


def test_the_same_problem_of_all_types_is_reported_once() -> None:
    error = refused(
        machine={"type": ["h100", "a100-80gb"], "gpus": 1}, run={"config": {"batch_size": 1}}, regions=["x-y1"]
    )
    assert error.problem == "Vertex AI training is not available in x-y1"


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        ({"type": ["h100", "b200"]}, "different numbers of GPUs: h100 has 1, b200 has 8"),
        ({"type": ["h100", "b200"], "gpus": 2}, "machine.gpus: 2 is not available for b200"),
        ({"type": ["h100", "h1000"], "gpus": 1}, "unknown GPU or machine type h1000"),
        ({"type": ["t4", "v100"], "gpus": 1}, "t4 and v100 have the same machine type, n1-standard-8"),
        ({"type": ["h100", "a3-highgpu-1g"], "gpus": 1}, "h100 and a3-highgpu-1g have the same machine type"),
    ],
)
def test_types_that_cannot_be_combined(machine: dict[str, Any], problem: str) -> None:
    assert problem in refused(machine=machine).problem


def test_types_with_different_images_need_a_build_for_all() -> None:
    types = {"type": ["h100", "b200"], "gpus": 8}
    error = refused(machine=types)
    assert "h100 needs linux/amd64 with cu126, b200 needs linux/amd64 with cu130" in error.problem
    assert "--set image.wheel=cu130" in error.hint
    plan = planned(machine=types, image={"wheel": "cu130"}, regions="any")
    assert {one.machine_type for one in plan.attempts} == {"a3-highgpu-8g", "a4-highgpu-8g"}
    job = spec(machine=types, image={"wheel": "cu130"})
    assert image(job, CATALOG, context()) == plan.image


def test_limits_hold_for_all_types() -> None:
    plan = planned(machine=TYPES, regions="any", run=TRAINER)
    dearest = max(one.usd_ceiling + sum(one.usd_extras.values()) for one in plan.attempts if one.usd_ceiling)
    assert plan.limits.usd_at_most == pytest.approx(dearest * (24 + 150 / 3600))
    cheapest = planned(machine={"type": "a100-80gb", "gpus": 1}, regions="any", run=TRAINER).limits.usd_at_most or 0
    error = refused(machine=TYPES, regions="any", run=TRAINER, limits={"usd": cheapest + 1})
    assert error.field == "limits.usd"


def test_a_run_that_is_too_long_on_one_type_says_on_which() -> None:
    config = {"model": {"name": "gpt2-124m"}, "steps": 300_000, "batch_size": 64, "compile": False}
    plan = planned(machine=TYPES, run={"config": config}, limits={"hours": 30})
    (warning,) = [text for text in plan.warnings if text.startswith("limits.hours is 30 h")]
    assert "on a2-ultragpu-1g (assumed 40 % MFU" in warning


def test_another_precision_on_another_type_is_a_warning() -> None:
    config = {"model": {"name": "gpt2-124m"}, "batch_size": 8}
    plan = planned(machine={"type": ["l4", "v100"], "gpus": 1}, run={"config": config}, regions="any")
    assert any("bf16 on l4, fp16 on v100" in text for text in plan.warnings)
    fixed = planned(
        machine={"type": ["l4", "v100"], "gpus": 1}, run={"config": {**config, "precision": "fp16"}}, regions="any"
    )
    assert not any(text.startswith("run.config.precision") for text in fixed.warnings)


def test_vms_have_one_type_and_a_rehearsal_the_first() -> None:
    with pytest.raises(PlanRefused, match="VMs take one type"):
        planned("vm", machine=TYPES)
    plan = planned("local", machine={"type": ["h100", "b200"]}, output=None)
    assert (plan.machine.machine_type, plan.machine.gpus, len(plan.attempts)) == ("a3-highgpu-1g", 1, 1)


def test_a_stored_plan_keeps_the_machines() -> None:
    plan = planned(machine=TYPES, regions="any")
    stored = read(msgspec.json.encode(plan))
    assert stored is not None
    assert (stored.plan.attempts, stored.plan.machines) == (plan.attempts, plan.machines)
    assert len(plan.machines) == 2


def test_a_comparison_tells_the_types_apart() -> None:
    before = planned(machine=TYPES, regions="any")
    after = planned(machine=TYPES, regions="any", env={"A": "1"})
    changes = compare_plans(before, after)
    assert [(one.field, one.attempts) for one in changes.fields] == [
        ("jobSpec.workerPoolSpecs[0].containerSpec.env.A", "")
    ]
    single = compare_plans(planned(machine={"type": "h100", "gpus": 1}, regions="any"), before)
    assert single.fields[0].field == "attempts"


@pytest.mark.parametrize("types", [["h100", "a100-80gb"], ["l4", "h100", "a100-80gb"]])
def test_the_page_names_the_type_of_each_attempt(types: list[str]) -> None:
    machine = {"type": types, "gpus": 1}
    job = spec(machine=machine, regions="any", run=TRAINER, output="gs://b/r")
    plan = planned(machine=machine, regions="any", run=TRAINER, output="gs://b/r")
    short, whole = [*plan_lines(plan, job)], [*plan_lines(plan, job, explain=True)]
    assert len(short) <= 25
    assert max(map(len, [*short, *whole])) <= 80
    rows = short[next(number for number, line in enumerate(short) if line.startswith("fallback order")) + 1 :][:5]
    assert [row.split()[3] for row in rows] == [one.machine_type for one in plan.attempts[:5]]
    machines = "\n".join(whole[: whole.index(next(line for line in whole if line.startswith("memory")))])
    for each in plan.machines:
        assert f"1 × {each.machine_type}: 1 × {each.gpu}, " in machines

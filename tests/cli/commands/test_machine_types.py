"""A job with several machine types, from the command line to its end: the next type after a refusal or a stockout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launch_train.common.storage import GcsFolder
from launch_train.report.settings import origin
from launch_train.runfolder.run import read_run
from launcher.testing.googlecloud import Fault, Status
from tests.cli.cloudjobs import CREATE, FULL, WELL, Job, scripts
from tests.command import launch

L4 = "custom_model_training_preemptible_nvidia_l4_gpus"
SPEC: dict[str, Any] = {
    "machine": {"type": ["a100-40gb", "l4"], "gpus": 2},
    "regions": ["us-central1"],
    "provisioning": ["spot"],
    "limits": {"hours": 1},
}
NO_QUOTA = Status(429, message=f"The following quota metrics exceed quota limits: aiplatform.googleapis.com/{L4}")


def machines(job: Job) -> list[tuple[str, str]]:
    """Region and machine type of each job that was requested."""
    pools = [(region, body["jobSpec"]["workerPoolSpecs"][0]) for region, body in job.created]
    return [(region, pool["machineSpec"]["machineType"]) for region, pool in pools]


@pytest.fixture
def types(job: Job) -> Job:
    """A job that tries L4, then A100, in one region."""
    job.write(**SPEC)
    return job


def test_a_refused_type_is_followed_by_the_next_in_the_same_region(types: Job) -> None:
    types.cloud.faults.add(Fault(CREATE, NO_QUOTA, times=1))
    run = types.data("vertex", "job.yaml", "--no-preflight")
    assert machines(types) == [("us-central1", "g2-standard-24"), ("us-central1", "a2-highgpu-2g")]
    assert run["state"] == "SUCCEEDED"
    attempts = types.data("status", run["run"])["attempts"]
    assert [one["machine"] for one in attempts] == ["g2-standard-24", "a2-highgpu-2g"]


def test_a_type_without_capacity_is_followed_by_the_next_and_its_resume_keeps_the_image(
    types: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", types.cloud.url)
    scripts(types.cloud, FULL, WELL)
    run = types.data("vertex", "job.yaml", "--no-preflight")["run"]
    types.write(**SPEC, run={"config": {"steps": 20}})
    ran = types.launch("vertex", "job.yaml", "--resume", run, "--no-preflight")
    assert "machine type" not in ran.err
    assert [machine for _, machine in machines(types)] == ["g2-standard-24", "a2-highgpu-2g", "g2-standard-24"]
    assert len({body["labels"]["launch-run"] for _, body in types.created}) == 1
    environment = types.created[1][1]["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"]
    gpu = json.loads(next(one["value"] for one in environment if one["name"] == contract.GPU))
    assert (gpu["name"], gpu["memory_gb"]) == ("a100-40gb", 40)


def test_the_report_names_the_type_that_ran(types: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", types.cloud.url)
    scripts(types.cloud, FULL, WELL)
    run = types.data("vertex", "job.yaml", "--no-preflight")["run"]
    assert origin(read_run(GcsFolder(f"gs://my-bucket/runs/{run}")))["machine"] == "a2-highgpu-2g"


def test_the_preflight_rules_out_the_type_without_quota_alone(types: Job) -> None:
    types.cloud.quotas.limits[L4, "us-central1"] = 0
    types.data("vertex", "job.yaml")
    assert machines(types) == [("us-central1", "a2-highgpu-2g")]


@pytest.mark.parametrize("target", ["vertex", "local"])
def test_names_with_commas_are_several_types(target: str) -> None:
    ran = launch(
        target, "--type", "h100, a100-80gb", "--gpus", "1", "--region", "us-central1", "--dry-run", "-o", "json"
    )
    assert ran.code == 0, ran.shown
    plan: dict[str, Any] = json.loads(ran.out)
    assert plan["spec"]["machine"]["type"] == ["h100", "a100-80gb"]
    types = {one["machine_type"] for one in plan["attempts"]}
    assert types == ({"a3-highgpu-1g", "a2-ultragpu-1g"} if target == "vertex" else {"a3-highgpu-1g"})


@pytest.mark.parametrize("text", ["h100,", ",h100", "h100,,l4"])
def test_a_missing_name_is_an_error(text: str) -> None:
    ran = launch("vertex", "--type", text, "--dry-run")
    assert ran.code == 2
    assert "--type: machine.type[" in ran.err
    assert "a name is missing" in ran.err


def test_a_list_of_gpus_keeps_the_specs_count_and_one_with_a_machine_type_does_not(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("machine: {type: h100, gpus: 4}\nregions: any\n")
    for types, gpus in (("h100,a100-40gb", 4), ("a3-highgpu-2g,a2-highgpu-2g", 2)):
        ran = launch("vertex", spec, "--type", types, "--dry-run", "-o", "json")
        assert json.loads(ran.out)["machine"]["gpus"] == gpus


def test_a_check_names_all_machines_and_an_estimate_has_one_part_for_each(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "machine: {type: [h100, a100-80gb], gpus: 1}\noutput: gs://my-bucket/r\nregions: any\n"
    )
    (checked,) = json.loads(launch("check", "-o", "json", cwd=tmp_path).out)["specs"]
    assert checked["result"] == "pass"
    assert {one["machine_type"] for one in checked["machines"]} == {"a3-highgpu-1g", "a2-ultragpu-1g"}
    assert checked["machine"] == checked["machines"][0]
    estimates = json.loads(launch("estimate", "job.yaml", "-o", "json", cwd=tmp_path).out)
    assert [one["machine"]["machine_type"] for one in estimates] == ["a3-highgpu-1g", "a2-ultragpu-1g"]
    page = launch("estimate", "job.yaml", cwd=tmp_path).out
    assert page.count("memory of one GPU") == 2


def test_a_sweep_tries_the_types_for_each_point(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "machine: {type: [h100, a100-80gb], gpus: 1}\noutput: gs://my-bucket/r\nregions: any\n"
    )
    ran = launch("sweep", "job.yaml", "--set", "run.config.seed=1,2", "--dry-run", cwd=tmp_path)
    assert ran.code == 0, ran.shown
    assert "a3-highgpu-1g (H100 80GB) or a2-ultragpu-1g (A100 80GB)" in " ".join(ran.out.split())

"""`launch vm SPEC --run` against a Compute Engine on loopback, on a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launcher.services import request
from launcher.services.compute.client import Compute
from launcher.testing.googlecloud import FakeClock, GoogleCloud, parse_instance
from tests.cli.cloudjobs import Job
from tests.runs.logs.test_reader_of_vms import print_on
from tests.runs.vm_runs import VmSite, exits, is_preempted
from tests.services.compute.vm_site import ZONE, work_body


@pytest.fixture
def site(job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> VmSite:
    made = VmSite(job.cloud, clock, [exits(0)])
    monkeypatch.setattr("launcher.clock.REAL", made.time)
    job.write(zones=["us-central1-a", "us-central1-b"], regions=None, provisioning=["spot"])
    return made


def inserts(cloud: GoogleCloud) -> list[tuple[str, Any]]:
    asked = (one for one in cloud.requests if one.method == "POST" and one.path.endswith("/instances"))
    return [(one.path.split("/")[6], one.body) for one in asked]


RUN = ("vm", "job.yaml", "--run", "--no-preflight")


def test_the_created_vm_is_that_of_the_dry_run(job: Job, site: VmSite) -> None:
    planned = job.data("vm", "job.yaml", "--run", "--dry-run")
    assert not job.cloud.requests
    ran = job.launch(*RUN)
    ((zone, body),) = inserts(job.cloud)
    assert zone == "us-central1-a"
    assert parse_instance(body) == parse_instance(planned["attempts"][0]["request"])
    assert f"run       {planned['run']} succeeded in 1 min" in ran.out
    assert "spot in us-central1-a, g2-standard-24" in ran.err
    assert "cost      ≈$0.0" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert job.cloud.compute.names() == []


def test_a_preempted_run_resumes_in_another_zone(job: Job, site: VmSite) -> None:
    site.does = [is_preempted, exits(0)]
    ran = job.launch(*RUN)
    assert "attempt   2: spot in us-central1-" in ran.err
    assert "preempted" in ran.err
    assert len(inserts(job.cloud)) == 2


def test_status_of_a_run_whose_vm_was_deleted(job: Job, site: VmSite) -> None:
    site.does = [exits(1)]
    failed = job.launch(*RUN, code=3)
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    assert f"launch vm --resume gs://my-bucket/runs/{run}" in failed.err
    shown = job.launch("status", f"gs://my-bucket/runs/{run}")
    assert f"{run}  failed" in shown.out
    assert "(spot in us-central1-a)" in " ".join(shown.out.split())
    data = job.data("status", f"gs://my-bucket/runs/{run}")
    assert (data["state"], data["zone"]) == ("FAILED", "us-central1-a")
    assert job.launch("status", run, code=2).err.count("gs://…/RUN") == 1  # no default output here


def test_a_run_is_found_in_the_default_output(job: Job, site: VmSite) -> None:
    job.write(zones=["us-central1-a"], regions=None, provisioning=["spot"], output="gs://my-project-launch/runs")
    job.cloud.objects.add("my-project-launch")
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    job.launch(*RUN, code=0)
    assert f"{run}  succeeded" in job.launch("status", run).out


@pytest.mark.slow
def test_status_logs_and_cancel_of_an_active_run(job: Job, site: VmSite) -> None:
    site.does = [lambda _site, _vm: None]
    begun = job.launch(*RUN, "--detach")
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    assert f"{run} is RUNNING in us-central1-a" in begun.out
    (listed,) = job.data("status")["runs"]
    assert (listed["run"], listed["state"], listed["machine"]) == (run, "RUNNING", "g2-standard-24")
    assert "runs" in job.launch("status", "job").out
    print_on(job.cloud, job.cloud.compute.vm(run).number, 0, "hello from the VM", run=run)
    assert job.launch("logs", run).out == "[workerpool0-0] hello from the VM\n"
    assert f"{run} has written no metrics yet" in job.launch("metrics", run, code=1).err
    ended = job.launch("cancel", "job").out
    assert f"{run} cancelled" in ended
    assert f"its folder: gs://my-bucket/runs/{run}" in ended
    status = job.launch("status", f"gs://my-bucket/runs/{run}").out
    assert "(spot in us-central1-a), cancelled" in " ".join(status.split())
    assert job.cloud.compute.names() == []
    assert "cancelled" in job.launch(*RUN, code=3).err
    site.does = [exits(0)]
    assert "succeeded" in job.launch("vm", "--no-preflight", "--resume", f"gs://my-bucket/runs/{run}").out


@pytest.mark.slow
def test_a_run_with_a_custom_id_resumes_after_its_vm_was_deleted(job: Job, site: VmSite) -> None:
    site.does = [exits(1), exits(0)]
    job.launch(*RUN, "--run-id", "mine", code=3)
    assert "run       mine succeeded" in job.launch(*RUN, "--resume", "mine").out
    for name in ("others", "job"):
        assert f"no run {name}" in job.launch(*RUN, "--resume", name, code=2).err
    assert len(inserts(job.cloud)) == 2


@pytest.mark.slow
def test_a_resume_with_more_steps(job: Job, site: VmSite) -> None:
    """And nothing else: the VM of the run is deleted by then, so its settings come from the run folder."""
    job.launch(*RUN)
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    change(job, run={"config": {"steps": 20, "checkpoint": {"minutes": 3}}})
    ran = job.launch(*RUN, "--resume", run)
    assert "resuming with steps: 10 → 20" in ran.err
    assert "checkpoint.minutes: (none) → 3" in ran.err
    assert f"{run} succeeded" in ran.out
    change(job, run={"config": {"steps": 20, "seed": 2}})
    refused = job.launch(*RUN, "--resume", run, code=2)
    assert ("run.config.seed" in refused.err, "resuming with" in refused.err) == (True, False)
    assert [config(body) for _, body in inserts(job.cloud)] == [
        {"steps": 10},
        {"steps": 20, "checkpoint": {"minutes": 3}},
    ]


def test_a_resume_on_more_gpus_in_another_zone(job: Job, site: VmSite) -> None:
    job.launch(*RUN)
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    job.write(machine={"type": "l4", "gpus": 4}, zones=["us-east4-a"], regions=None, provisioning=["spot"])
    ran = job.launch(*RUN, "--resume", run)
    for line in (
        "gpus: 2 → 4",
        "machine type: g2-standard-24 → g2-standard-48",
        "zone: us-central1-a, us-central1-b → us-east4-a",
    ):
        assert f"resuming with {line}" in ran.err
    assert [(zone, request.read(body).gpus) for zone, body in inserts(job.cloud)] == [
        ("us-central1-a", 2),
        ("us-east4-a", 4),
    ]
    assert f"{run} succeeded" in ran.out


def change(job: Job, **fields: Any) -> None:
    """Write the site's spec with other fields."""
    job.write(zones=["us-central1-a", "us-central1-b"], regions=None, provisioning=["spot"], **fields)


def config(body: Any) -> Any:
    """The run.config of a VM that was created."""
    return json.loads(request.read(body).env[contract.CONFIG])


def test_cancel_removes_the_leftovers_of_a_finished_run(job: Job, site: VmSite) -> None:
    """Its VM was stopped, and nobody followed: `launch vm list --orphans` names this command."""
    site.does = [lambda _site, _vm: None]
    job.launch(*RUN, "--detach")
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    job.cloud.compute.power_off(run)
    site.clock.advance(120)
    assert f"launch cancel {run}" in job.launch("vm", "list", "--orphans").out
    assert f"{run} is stopped but not deleted" in job.launch("cancel", run).err
    assert job.cloud.compute.names() == []


@pytest.mark.parametrize("by_name", [True, False])
def test_a_workstation_vm_with_a_run_like_name_is_not_a_run(job: Job, site: VmSite, by_name: bool) -> None:
    """Its disk holds work, and `launch cancel` doesn't ask."""
    made = Compute("my-project", job.cloud.environ(), site.time).insert(ZONE, work_body("box-20261121"), "5" * 8)
    site.clock.advance(100)
    name = "box-20261121" if by_name else f"projects/my-project/zones/{ZONE}/instances/{made.target}"
    assert "launch vm status" in job.launch("cancel", name, code=2).err
    assert job.cloud.compute.vm("box-20261121").status == "RUNNING"


@pytest.mark.slow
def test_new_beside_a_run_that_has_ended(job: Job, site: VmSite) -> None:
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    job.launch(*RUN)
    again = job.launch(*RUN)
    assert "has already succeeded" in again.err
    assert f"{run} succeeded in 1 min" in again.out
    followed = job.launch("follow", f"gs://my-bucket/runs/{run}")
    assert f"{run} succeeded in 1 min" in followed.out
    assert "nothing was started" not in followed.err
    assert f"{run}-2 succeeded" in job.launch(*RUN, "--new").out
    assert f"{run}-3 succeeded" in job.launch(*RUN, "--new").out


def test_a_run_belongs_to_one_service_at_a_time(job: Job, site: VmSite) -> None:
    site.does = [lambda _site, _vm: None]
    job.launch(*RUN, "--detach")
    run = job.data("vm", "job.yaml", "--run", "--dry-run")["run"]
    assert job.data("vertex", "job.yaml", "--dry-run")["run"] == run
    ran = job.launch("vertex", "job.yaml", "--detach")
    assert not job.created
    assert "us-central1-a" in ran.out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("vm", "--new"), "--new requires --run"),
        (("vm", "--run", "--lease", "4h"), "--lease cannot be combined with --run"),
        (("vm", "--dry-run", "--detach"), "--detach cannot be combined with --dry-run"),
        (("vm", "job.yaml", "--run", "--new", "--resume", "job"), "--resume cannot be combined with --new"),
        (("vm", "job.yaml", "--run", "--resume", "-o"), "needs a run"),
        (("vm", "job.yaml", "--run", "--resume", "job", "--run-id", "x"), "--resume names the run"),
        (("vm", "job.yaml", "--run", "--new", "--run-id", "x"), "--run-id cannot be combined with --new"),
        (("vm", "--run-id", "x"), "--run-id requires --run"),
        (("vm", "lst"), "Did you mean launch vm list?"),
    ],
)
def test_conflicting_flags_are_refused(job: Job, argv: tuple[str, ...], said: str) -> None:
    assert said in job.launch(*argv, code=2).err


def test_a_spec_named_like_a_subcommand(job: Job, site: VmSite, tmp_path: Path) -> None:
    (tmp_path / "list").write_text((tmp_path / "job.yaml").read_text())
    assert job.launch("vm", "list").out == "No VMs.\n"
    assert json.loads(job.launch("vm", "./list", "--run", "--dry-run", "-o", "json").out)["target"] == "vm"

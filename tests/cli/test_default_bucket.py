"""The default output gs://PROJECT-launch can be guessed: it is used only if the project owns it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.testing.googlecloud import FakeClock, Fault, Status
from tests.cli.cloudjobs import FULL, WELL, Job, scripts
from tests.cli.commands.vm.test_run import RUN
from tests.runs.vm_runs import VmSite, exits

BUCKET = "my-project-launch"
GET = "cloudresourcemanager.projects.get"
DISABLED = Status(403, message="Cloud Resource Manager API has not been used", info="SERVICE_DISABLED")


@pytest.fixture
def left_out(job: Job) -> Job:
    """A spec without `output`, and the project's own bucket."""
    spec = json.loads((job.folder / "job.yaml").read_text())
    del spec["output"]
    (job.folder / "job.yaml").write_text(json.dumps(spec))
    job.cloud.objects.add(BUCKET)
    return job


def squat(job: Job) -> None:
    """The bucket is somebody else's."""
    known = job.cloud.objects.settings[BUCKET]
    job.cloud.objects.settings[BUCKET] = replace(known, project_number="999999999999")


def used(job: Job) -> list[str]:
    """Requests for what is in the bucket."""
    return [one.path for one in job.cloud.requests if f"/b/{BUCKET}/o" in one.path]


def test_the_projects_own_bucket_is_used(left_out: Job) -> None:
    run = left_out.data("vertex", "job.yaml")["run"]
    assert f"runs/{run}/plan.json" in left_out.cloud.objects.buckets[BUCKET]


TROUBLE: dict[str, Callable[[Job], object]] = {
    "another project's": squat,
    "its settings can't be read": lambda job: job.cloud.objects.deny(BUCKET, "storage.buckets.get"),
    "the project's number can't be read": lambda job: job.cloud.faults.add(Fault(GET, Status(403), times=None)),
    "the API is disabled": lambda job: job.cloud.faults.add(Fault(GET, DISABLED, times=None)),
    "no such project": lambda job: job.cloud.faults.add(Fault(GET, Status(404), times=None)),
    "no answer": lambda job: job.cloud.faults.add(Fault(GET, Status(503), times=None)),
}
COMMANDS = [("vertex", "job.yaml"), ("vertex", "job.yaml", "--new"), ("vertex", "job.yaml", "--resume", "job-01234567")]


@pytest.mark.parametrize("argv", COMMANDS)
@pytest.mark.parametrize("what", TROUBLE)
def test_another_projects_bucket_is_refused(left_out: Job, what: str, argv: tuple[str, ...]) -> None:
    TROUBLE[what](left_out)
    ran = left_out.launch(*argv, code=4)
    assert f"gs://{BUCKET}" in ran.err
    assert "output: gs://" in ran.err
    assert not left_out.created
    assert not used(left_out)


def test_naming_the_bucket_is_consent(job: Job) -> None:
    job.cloud.objects.add(BUCKET)
    squat(job)
    job.launch("vertex", "job.yaml", "--output", f"gs://{BUCKET}/runs", "--no-preflight")
    assert not [one for one in job.cloud.requests if one.path == "/v1/projects/my-project"]


def test_a_missing_bucket_is_refused(left_out: Job) -> None:
    del left_out.cloud.objects.settings[BUCKET]
    ran = left_out.launch("vertex", "job.yaml", code=2)
    assert f"gcloud storage buckets create gs://{BUCKET}" in ran.err
    assert not left_out.created


def test_runs_are_not_searched_in_another_projects_bucket(left_out: Job) -> None:
    squat(left_out)
    left_out.launch("follow", "job-01234567", code=2)
    assert not used(left_out)


def test_a_run_whose_bucket_changed_projects_is_only_watched(left_out: Job) -> None:
    """Whoever deletes a bucket gives its name away."""
    scripts(left_out.cloud, FULL, WELL)
    run = left_out.data("vertex", "job.yaml", "--detach")["run"]
    squat(left_out)
    left_out.launch("follow", run, code=4)
    left_out.launch("vertex", "--resume", run, code=4)
    assert len(left_out.created) == 1


def test_vms_refuse_another_projects_bucket(left_out: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    site = VmSite(left_out.cloud, clock, [exits(0)])
    monkeypatch.setattr("launcher.clock.REAL", site.time)
    squat(left_out)
    left_out.launch(*RUN, "--set", "provisioning=[spot]", "--set", "regions=[us-central1]", code=4)
    assert not site.zones

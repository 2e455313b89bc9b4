"""What a user's CI does with the fixture `google_cloud`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import api
from launcher.errors import JobFailed, PlanRefused
from launcher.testing import FAILED, NO_CAPACITY, PREEMPTED, RUNNING, SUCCEEDED, LoopbackCloud, google_cloud
from launcher.testing.googlecloud import Fault, Status
from tests.command import ROOT

__all__ = ["google_cloud"]

SPEC = """\
name: mine
machine: {type: l4, gpus: 2}
provisioning: [spot, standard]
regions: [us-central1, us-east4]
run: {config: {steps: 20}}
image: {repository: us-docker.pkg.dev/their-project/images}
output: gs://their-bucket/runs
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def test_a_job_is_sent_and_succeeds(google_cloud: LoopbackCloud, spec: Path) -> None:
    run = google_cloud.submit(spec)
    assert run.wait().state == "SUCCEEDED"
    (request,) = google_cloud.job_requests
    assert request == google_cloud.plan(spec).requests[0] | {
        "labels": request["labels"],  # with the plan's digest
        "jobSpec": request["jobSpec"],  # with the image's digest
    }
    machine, planned = (
        body["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] for body in (request, google_cloud.plan(spec).requests[0])
    )
    assert machine == planned, "enums have names, as in a dry run"


def test_a_preemption_continues_and_a_full_region_is_left(google_cloud: LoopbackCloud, spec: Path) -> None:
    google_cloud.next_jobs(NO_CAPACITY, PREEMPTED, SUCCEEDED)
    ended = google_cloud.submit(spec).wait()
    assert [one.end.kind for one in ended.attempts if one.end] == ["stockout", "preempted", "succeeded"]


def test_an_expensive_job_needs_no_limit_here(google_cloud: LoopbackCloud, spec: Path) -> None:
    machine = {
        "machine.type": "h100",
        "machine.gpus": 8,
        "machine.nodes": 8,
        "run.config.batch_size": 64,
        "regions": ["us-central1"],
    }
    assert google_cloud.submit(spec, changes=machine).wait().state == "SUCCEEDED"


def test_a_job_fails(google_cloud: LoopbackCloud, spec: Path) -> None:
    google_cloud.next_jobs(FAILED)
    with pytest.raises(JobFailed):
        google_cloud.submit(spec).wait()


def test_a_job_is_cancelled(google_cloud: LoopbackCloud, spec: Path) -> None:
    google_cloud.next_jobs(RUNNING)
    run = google_cloud.submit(spec)
    assert run.cancel().done
    assert run.status().state == "CANCELLED"


def test_a_finished_image_is_replaced_too(google_cloud: LoopbackCloud, spec: Path) -> None:
    image = f"us-docker.pkg.dev/their-project/images/train@sha256:{'a' * 64}"
    spec.write_text(SPEC.replace("repository: us-docker.pkg.dev/their-project/images", f"uri: '{image}'"))
    assert google_cloud.submit(spec).wait().state == "SUCCEEDED"


def test_a_limit_holds_and_faults_are_retried(google_cloud: LoopbackCloud, spec: Path) -> None:
    with pytest.raises(PlanRefused):
        google_cloud.submit(spec, changes={"limits.usd": 0.01})
    google_cloud.google.faults.add(Fault("aiplatform.projects.locations.customJobs.create", Status(503)))
    assert google_cloud.submit(spec).wait().state == "SUCCEEDED"
    assert len(google_cloud.job_requests) == 2


def test_vms(google_cloud: LoopbackCloud, spec: Path) -> None:
    run = google_cloud.submit(spec, target="vm")
    assert google_cloud.google.compute.names()
    assert run.cancel().done


def test_clients_of_google_reach_it_too(google_cloud: LoopbackCloud, spec: Path) -> None:
    google_cloud.submit(spec)
    from google.cloud import storage

    assert [*storage.Client(project="my-project").list_blobs("their-bucket")]
    assert api.find(google_cloud.plan(spec).run).status().has_ended is False


@pytest.mark.slow
def test_it_works_from_a_conftest(tmp_path: Path, spec: Path) -> None:
    (tmp_path / "conftest.py").write_text("from launcher.testing import google_cloud\n")
    (tmp_path / "test_mine.py").write_text(
        f"def test_mine(google_cloud):\n    assert google_cloud.submit({str(spec)!r}).wait().state == 'SUCCEEDED'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'train'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_cloud_on_its_own_needs_no_pytest() -> None:
    program = "import sys; sys.modules['pytest'] = None; import launcher.testing.googlecloud.__main__"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_a_spec_may_be_data(google_cloud: LoopbackCloud) -> None:
    import yaml

    made = google_cloud.plan(yaml.safe_load(SPEC))
    assert json.dumps(made.to_dict()).count("their-bucket")

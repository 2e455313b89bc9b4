"""`launch status`, `logs` and `cancel` against a Vertex AI on loopback, on a clock of its own."""

from __future__ import annotations

import json

import pytest

from launcher.cli.commands.status import SHOWN
from launcher.clock import Clock
from launcher.vertex.backend import Vertex
from tests.cli.cloudjobs import RUNS, Job
from tests.googlecloud import FakeClock, Fault, Status


def test_a_run_that_is_not_there(job: Job) -> None:
    assert "no run nothing in 38 regions" in job.launch("status", "nothing", code=2).err
    assert job.launch("status").out == "No runs.\n"
    assert job.data("status") == {"runs": []}
    named = "projects/my-project/locations/us-central1/customJobs/7"
    assert "there is no job" in job.launch("follow", named, code=1).err


def test_a_job_is_found_by_all_its_names(job: Job) -> None:
    shown = job.data("vertex", "job.yaml")
    for text in (shown["run"], "job", shown["job"], shown["job"].rpartition("/")[2]):
        assert job.data("status", text)["job"] == shown["job"], text


def test_a_region_that_cannot_be_read_is_told(job: Job) -> None:
    shown = job.data("vertex", "job.yaml")
    job.cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.list", Status(403), times=1))
    ran = job.launch("status", shown["run"])
    assert "could not be read" in ran.err
    assert shown["run"] in ran.out


def test_lines_are_printed_once_each_and_as_json(job: Job, clock: FakeClock) -> None:
    shown = job.data("vertex", "job.yaml")
    name = shown["job"].rpartition("/")[2]
    for number in range(5):
        job.cloud.logs.write(name, "workerpool0-0", f"line {number}")
        clock.advance(1)
    assert job.launch("logs", "job").out == "".join(f"[workerpool0-0] line {n}\n" for n in range(5))
    tail = job.launch("logs", "job", "--tail", "2", "-o", "json").out.splitlines()
    assert [json.loads(line)["text"] for line in tail] == ["line 3", "line 4"]


LIST = "aiplatform.projects.locations.customJobs.list"
TWO = ("--region", "us-central1", "--region", "us-east4")


def test_what_is_not_seen_is_not_said_to_be_missing(job: Job) -> None:
    job.cloud.faults.add(Fault(LIST, Status(403), name="us-east4", times=None))
    ran = job.launch("status", "nothing", code=1)
    assert "no run nothing was found, but 1 of 38 regions could not be read" in ran.err


def test_a_cancel_that_has_not_seen_all_says_so(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.cloud.faults.add(Fault(LIST, Status(403), name="us-east4", times=None))
    ran = job.launch("cancel", run, *TWO, code=1)
    assert ran.out.startswith(f"{run} cancelled")
    assert f"us-east4 could not be read; {run} may have a job there" in ran.err
    ran = job.launch("cancel", run, *TWO, code=1)
    assert "nothing to do" in ran.out
    job.cloud.faults.clear()
    assert "nothing to do" in job.launch("cancel", run, *TWO).out


def test_one_job_that_cannot_be_cancelled_keeps_no_other_alive(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    body = job.data("vertex", "job.yaml", "--dry-run")["attempts"][0]["request"]
    client = Vertex("my-project", job.env)
    made = [client.create_in(region, body) for region in ("us-central1", "us-east4")]
    job.cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.cancel", Status(403), name=made[0].id))
    job.launch("cancel", "job", "-o", "json", code=4)
    states = {one["region"]: one["state"] for one in job.data("status", "job")["jobs"]}
    assert states == {"us-central1": "QUEUED", "us-east4": "CANCELLED"}


def test_data_is_not_cut(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    client = Vertex("my-project", job.env)
    body = job.data("vertex", "job.yaml", "--dry-run")["attempts"][0]["request"]
    for number in range(SHOWN + 2):
        client.create_in("us-central1", {**body, "labels": {**body["labels"], "launch-run": f"job-{number:08x}"}})
    assert len(job.data("status", "--region", "us-central1")["runs"]) == SHOWN + 2
    listed = job.launch("status", "--region", "us-central1").out.splitlines()
    assert len(listed) == SHOWN + 2
    assert listed[-1] == "… and 2 older runs (--all)"
    assert len(job.launch("status", "--region", "us-central1", "--all").out.splitlines()) == SHOWN + 3


def test_a_resource_name_leads_to_google_alone(job: Job) -> None:
    for region in ("evil.example", "us-central1@evil.example", "x#", "a:80"):
        ran = job.launch("status", f"projects/my-project/locations/{region}/customJobs/7", code=2)
        assert "no run projects/" in ran.err


def test_logs_are_followed_to_the_jobs_end(job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    name = job.data("vertex", "job.yaml", "--detach")["job"].rpartition("/")[2]
    job.cloud.logs.write(name, "workerpool0-0", "at once")
    written = iter(range(100))

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        job.cloud.logs.write(name, "workerpool0-0", f"line {next(written)}")

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    job.cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.get", Status(503), times=12, after=3))
    ran = job.launch("logs", "job", "-f")
    shown = ran.out.splitlines()
    assert shown[0] == "[workerpool0-0] at once"
    assert shown[1:] == [f"[workerpool0-0] line {n}" for n in range(len(shown) - 1)]
    assert len(shown) > 10
    assert "job state temporarily unavailable" in ran.err
    assert "job state available again" in ran.err
    assert job.launch("logs", "job", "-f", "--tail", "1").out == f"{shown[-1]}\n" or len(shown) < next(written)


def test_ctrl_c_ends_logs(job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cloud.jobs.script = RUNS
    job.launch("vertex", "job.yaml", "--detach")

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        if clock() > begun + 60:
            raise KeyboardInterrupt

    begun = clock()
    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    assert "Traceback" not in job.launch("logs", "job", "-f", code=130).err


def test_logs_are_no_yaml(job: Job) -> None:
    job.data("vertex", "job.yaml")
    assert "-o yaml is not available" in job.launch("logs", "job", "-o", "yaml", code=2).err


@pytest.mark.parametrize("region", ["us-centrl1", "evil.example/#"])
def test_a_region_that_is_none_is_asked_nothing(job: Job, region: str) -> None:
    for command in ("status", "follow", "logs", "cancel"):
        ran = job.launch(command, *(("job",) if command != "status" else ()), "--region", region, code=2)
        assert f"training is not available in {region}" in ran.err
    assert not job.cloud.requests
    assert "us-central1" in ran.err


def test_any_region_is_all_of_them(job: Job) -> None:
    job.launch("status", "--region", "any")
    vertex = {one.path for one in job.cloud.requests if one.path.endswith("/customJobs")}
    vms = {one.path for one in job.cloud.requests} - vertex
    assert (len(vertex), vms) == (38, {"/compute/v1/projects/my-project/aggregated/instances"})


def test_ctrl_c_in_a_cancel_takes_nothing_back(job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    assert f"{run} may still be cancelled" in job.launch("cancel", "job", code=130).err


@pytest.mark.parametrize("told", [True, False])
def test_vms_that_cant_be_read_are_told_unless_there_can_be_none(job: Job, told: bool) -> None:
    job.launch("vertex", "job.yaml", "--detach")
    reason = "forbidden" if told else "accessNotConfigured"
    words = "Required 'compute.instances.list' permission" if told else "API has not been used in project"
    job.cloud.faults.add(Fault("compute.*", Status(403, reason=reason, message=words), times=None))
    ran = job.launch("status")
    assert "QUEUED" in ran.out
    assert ("Compute Engine could not be read" in ran.err) == told

"""`launch status`, `logs` and `cancel` against a Vertex AI on loopback, on a clock of its own."""

from __future__ import annotations

import json

import pytest

from launcher.cli.ui.run_table import SHOWN
from launcher.clock import Clock
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, Status
from tests.cli.cloudjobs import FULL, RUNS, WELL, Job, scripts
from tests.command import launch


def test_an_unknown_run_is_refused(job: Job) -> None:
    assert "no run nothing in 38 regions" in job.launch("status", "nothing", code=2).err
    assert job.launch("status").out == "No runs.\n"
    assert job.data("status") == {"runs": [], "sweeps": [], "unlisted": None}
    named = "projects/my-project/locations/us-central1/customJobs/7"
    assert "does not exist" in job.launch("follow", named, code=1).err


def test_a_job_is_found_by_all_its_names(job: Job) -> None:
    shown = job.data("vertex", "job.yaml")
    for text in (shown["run"], "job", shown["job"], shown["job"].rpartition("/")[2]):
        assert job.data("status", text)["job"] == shown["job"], text


def test_a_spec_names_its_run_in_the_project_of_its_settings(job: Job) -> None:
    """launch.yaml beside the spec counts, from any folder; one in the current folder alone does not."""
    shown = job.data("vertex", "job.yaml")
    (job.folder / "launch.yaml").write_text("project: {id: my-project}\n")
    job.env["CLOUDSDK_CORE_PROJECT"] = ""
    elsewhere = job.folder / "elsewhere"
    elsewhere.mkdir()
    for command in ("status", "logs", "follow", "metrics", "cancel"):
        ran = launch(command, "../job.yaml", env=job.env, cwd=elsewhere)
        assert ran.code == (1 if command == "metrics" else 0), ran.shown
        assert (shown["run"] in ran.shown) or command == "logs"
    assert "no Google Cloud project is set" in launch("status", "job", env=job.env, cwd=job.folder).err


def test_the_story_of_a_run_with_two_attempts(job: Job, clock: FakeClock) -> None:
    scripts(job.cloud, FULL, WELL)
    run = job.data("vertex", "job.yaml")["run"]
    found = job.data("status", run, "--events")
    first, second = found["story"]
    assert "Resources are insufficient" in first or "capacity" in first
    assert second.endswith("succeeded")
    assert (found["usd"] > 0, found["usd_at_most"] > found["usd"], found["events"]) == (True, True, [])
    shown = job.launch("status", run).out
    assert max(map(len, shown.rpartition("\n\n")[0].splitlines())) <= 80
    assert f"launch report {run}" in shown


def test_an_unreachable_region_is_reported(job: Job) -> None:
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


def test_a_job_in_an_unreachable_region_is_not_called_missing(job: Job) -> None:
    job.cloud.faults.add(Fault(LIST, Status(403), name="us-east4", times=None))
    ran = job.launch("status", "nothing", code=1)
    assert "no run nothing was found, but 1 of 38 regions could not be read" in ran.err


def test_cancel_reports_unreachable_regions(job: Job) -> None:
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


def test_a_failed_cancel_does_not_block_the_others(job: Job) -> None:
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
    assert listed[-1].startswith(f"{SHOWN + 2} runs, ")
    assert listed[-1].endswith("2 older rows: --all")
    assert len(job.launch("status", "--region", "us-central1", "--all").out.splitlines()) == SHOWN + 4


def test_a_resource_name_is_sent_to_google_only(job: Job) -> None:
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


def test_logs_refuse_yaml(job: Job) -> None:
    job.data("vertex", "job.yaml")
    assert "-o yaml is not available" in job.launch("logs", "job", "-o", "yaml", code=2).err


@pytest.mark.parametrize("region", ["us-centrl1", "evil.example/#"])
def test_an_invalid_region_is_refused_without_a_request(job: Job, region: str) -> None:
    for command in ("status", "follow", "logs", "cancel"):
        ran = job.launch(command, *(("job",) if command != "status" else ()), "--region", region, code=2)
        assert f"training is not available in {region}" in ran.err
    assert not job.cloud.requests
    assert "us-central1" in ran.err


def test_region_any_means_all_regions(job: Job) -> None:
    job.launch("status", "--region", "any")
    vertex = {one.path for one in job.cloud.requests if one.path.endswith("/customJobs")}
    vms = {one.path for one in job.cloud.requests} - vertex
    assert (len(vertex), vms) == (38, {"/compute/v1/projects/my-project/aggregated/instances"})


def test_ctrl_c_does_not_undo_a_cancel(job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    assert f"{run} may still be cancelled" in job.launch("cancel", "job", code=130).err


@pytest.mark.parametrize("told", [True, False])
def test_unreadable_vms_are_reported_if_there_can_be_any(job: Job, told: bool) -> None:
    job.launch("vertex", "job.yaml", "--detach")
    reason = "forbidden" if told else "accessNotConfigured"
    words = "Required 'compute.instances.list' permission" if told else "API has not been used in project"
    job.cloud.faults.add(Fault("compute.*", Status(403, reason=reason, message=words), times=None))
    ran = job.launch("status")
    assert "QUEUED" in ran.out
    assert ("Compute Engine could not be read" in ran.err) == told

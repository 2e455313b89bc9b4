"""`launch vertex` against a Vertex AI on loopback, on a clock of its own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from launcher.testing.googlecloud import FakeClock, Fault, Reset, Stage, Status, parse_custom_job
from tests.cli.cloudjobs import CREATE, FAILED, FULL, RUNS, WAITS, WELL, Job, scripts
from tests.command import launch


def test_the_submitted_request_is_that_of_the_dry_run(job: Job) -> None:
    planned = job.data("vertex", "job.yaml", "--dry-run")
    assert not job.cloud.requests
    ran = job.launch("vertex", "job.yaml")
    ((region, body),) = job.created
    assert region == "us-central1"
    assert parse_custom_job(body) == parse_custom_job(planned["attempts"][0]["request"])  # canonical proto3 JSON
    assert f"run       {planned['run']} succeeded in 20 s" in ran.out
    assert "queued" in ran.err
    assert "running (10 s after creation)" in ran.err
    assert max(map(len, ran.out.splitlines())) <= 80


def test_without_capacity_the_next_placement_is_tried(job: Job) -> None:
    scripts(job.cloud, FULL, WELL)
    ran = job.launch("vertex", "job.yaml")
    assert [region for region, _ in job.created] == ["us-central1", "us-east4"]
    assert "no capacity for g2-standard-24 in us-central1" in ran.err
    assert ran.err.index("no capacity for g2-standard-24") < ran.err.index("us-east4")
    first, second = job.data("status", "job")["story"]
    assert "us-central1" in first
    assert "no capacity for g2-standard-24" in first
    assert "us-east4" in second
    assert "succeeded" in second


def test_without_any_capacity_all_attempts_are_listed(job: Job) -> None:
    job.cloud.jobs.script = FULL
    ran = job.launch("vertex", "job.yaml", code=5)
    assert [region for region, _ in job.created] == ["us-central1", "us-east4"] * 2
    for number, place in enumerate(("us-central1, standard", "us-east4, standard", "us-central1, spot"), 1):
        assert f"{number}. {place}: no capacity for g2-standard-24" in ran.err
    assert ran.err.count("Try more regions") == 5  # after each, and once at the end
    assert not ran.out


def test_a_superseded_job_is_not_a_failure(job: Job) -> None:
    taken = "The replica workerpool0-0 exited with a non-zero status of 77."
    scripts(job.cloud, (*RUNS, Stage("JOB_STATE_FAILED", 60, (3, taken))), WELL)
    ran = job.launch("vertex", "job.yaml")
    assert "exited with 77: another start" in ran.err
    assert "succeeded" in ran.out


def test_resume_without_a_spec_changes_nothing(job: Job) -> None:
    for words in (("--output", "gs://other/runs"), ("--gpus", "4")):
        ran = job.launch("vertex", "--resume", "job", *words, code=2)
        assert f"{words[0]} requires a spec" in ran.err


def test_a_user_error_ends_the_run_with_a_hint(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    ran = job.launch("vertex", "job.yaml", code=3)
    assert "failed" in ran.out
    assert len(job.created) == 1
    run = job.data("status", "job")["run"]
    assert f"--resume {run}" in ran.err
    again = job.launch("vertex", "job.yaml", code=3)
    assert "has already ended, so nothing was started" in again.err
    assert "--new starts a fresh run" in again.err
    assert len(job.created) == 1


def test_the_same_command_follows_the_active_run(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    begun = job.data("vertex", "job.yaml", "--detach")
    assert begun["state"] == "QUEUED"
    ran = job.launch("vertex", "job.yaml", "--watch-for", "2m", code=6)
    assert "(already exists)" in ran.err
    assert f"launch follow {begun['run']}" in ran.err
    assert len(job.created) == 1
    cancelled = job.launch("cancel", "job")
    assert cancelled.out.startswith(f"{begun['run']} cancelled after 1 min")
    assert "nothing to do" in job.launch("cancel", "job").out


def test_follow_continues_the_attempts_of_a_stopped_launch(job: Job, clock: FakeClock) -> None:
    scripts(job.cloud, FULL, WELL)
    begun = job.data("vertex", "job.yaml", "--detach")
    clock.advance(3600)
    ran = job.launch("follow", begun["run"])
    assert [region for region, _ in job.created] == ["us-central1", "us-east4"]
    assert "succeeded" in ran.out


def test_a_job_that_waits_too_long_is_cancelled_before_the_next_is_made(job: Job) -> None:
    job.write(limits={"wait": "10m"})
    scripts(job.cloud, WAITS, WELL)
    ran = job.launch("vertex", "job.yaml")
    calls = [
        one.path.rpartition("/")[2] for one in job.cloud.requests if one.method == "POST" and "customJobs" in one.path
    ]
    assert [call.partition(":")[2] or call for call in calls] == ["customJobs", "cancel", "customJobs"]
    assert "PENDING for 10 min, longer than limits.wait" in ran.err
    assert [one["state"] for one in job.data("status", "job")["jobs"]] == ["SUCCEEDED", "CANCELLED"]


@pytest.mark.slow
def test_new_starts_another_run_and_resume_the_same(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    job.launch("vertex", "job.yaml", code=3)
    first = job.data("status", "job")["run"]
    job.cloud.jobs.script = RUNS
    fresh = job.data("vertex", "job.yaml", "--new", "--detach")
    assert fresh["run"] == f"{first}-2"
    same = job.data("vertex", "job.yaml", "--new", "--detach")  # active: followed
    assert same["run"] == f"{first}-2"
    assert same["job"] == fresh["job"]
    job.cloud.jobs.script = WELL
    for words in (("--resume", first), ("job.yaml", "--resume", first)):
        ran = job.launch("vertex", *words)
        assert f"{first} succeeded" in ran.out
    runs = [body["labels"]["launch-run"] for _, body in job.created]
    assert runs == [first, f"{first}-2", first, first]
    listed = {one["run"]: one["state"] for one in job.data("status")["runs"]}
    assert listed == {first: "SUCCEEDED", f"{first}-2": "RUNNING"}
    ended = job.launch("cancel", f"{first}-2").out
    assert ended.startswith(f"{first}-2 cancelled")
    assert "2 runs match job" in job.launch("logs", "job", code=2).err
    ran = job.launch("vertex", "--resume", "job", code=2)
    assert f"launch vertex --resume {first}-2 " in ran.err
    assert "launch vertex --resume job --last" in ran.err
    ran = job.launch("vertex", "--resume=job", code=2)
    assert f"launch vertex --resume={first}-2 " in ran.err
    assert "launch vertex --resume=job --last" in ran.err
    assert f"{first} succeeded" in job.launch("vertex", "--resume", "job", "--last").out, "its job is the newest"


def test_a_run_id_belongs_to_one_computation(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    job.launch("vertex", "job.yaml", "--run-id", "mine", "--detach")
    job.write(run={"config": {"steps": 20}})
    ran = job.launch("vertex", "job.yaml", "--run-id", "mine", "--detach", code=2)
    assert "run.config.steps: 10 → 20" in ran.err
    assert len(job.created) == 1


REFUSALS = {
    "permission": (
        Status(
            403,
            message="Permission 'aiplatform.customJobs.create' denied on resource "
            "'//aiplatform.googleapis.com/projects/my-project/locations/us-central1' (or it may not exist).",
        ),
        4,
        "roles/aiplatform.user",
    ),
    "project": (
        Status(403, message="Permission denied on resource project my-project.", info="CONSUMER_INVALID"),
        4,
        "my-project",
    ),
    "disabled": (
        Status(
            403,
            message="Vertex AI API has not been used in project 1 before or it is disabled.",
            info="SERVICE_DISABLED",
        ),
        1,
        "gcloud services enable aiplatform.googleapis.com",
    ),
    "actAs": (
        Status(400, message="You do not have permission to act as service_account: SA. (or it may not exist)."),
        4,
        "roles/iam.serviceAccountUser",
    ),
    "credentials": (Status(401), 4, "gcloud auth application-default login"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_permanent_failure_stops_at_once(job: Job, name: str) -> None:
    effect, code, hint = REFUSALS[name]
    job.cloud.faults.add(Fault(CREATE, effect, times=None))
    ran = job.launch("vertex", "job.yaml", code=code)
    assert hint in ran.err
    assert len(job.created) == 1
    assert "Traceback" not in ran.err
    job.cloud.faults.clear()  # given what was missing, the same command works
    assert "succeeded" in job.launch("vertex", "job.yaml").out


def test_a_quota_error_has_its_name_and_numbers(job: Job) -> None:
    metric = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"
    words = f"The following quota metrics exceed quota limits: {metric}"
    job.cloud.faults.add(Fault(CREATE, Status(429, message=words), times=None))
    ran = job.launch("vertex", "job.yaml", code=5)
    assert len(job.created) == 4
    assert metric in ran.err
    assert "2 are needed" in ran.err
    assert "CustomModelTrainingL4GPUsPerProjectPerRegion" in ran.err


@pytest.mark.parametrize("effect", [Reset("after"), Reset(), Status(503), Status(500)])
def test_a_lost_response_creates_no_second_job(job: Job, effect: Any) -> None:
    job.cloud.faults.add(Fault(CREATE, effect))
    ran = job.launch("vertex", "job.yaml")
    assert "succeeded" in ran.out
    assert len(job.cloud.jobs.jobs) == 1


def test_a_missing_bucket_is_refused(job: Job) -> None:
    job.write(output="gs://nobodys-bucket/runs")
    ran = job.launch("vertex", "job.yaml", code=2)
    assert "gcloud storage buckets create gs://nobodys-bucket" in ran.err
    assert not job.created


def test_no_credentials_at_all(job: Job) -> None:
    job.write(image={"uri": f"us-docker.pkg.dev/my-project/launch/train@sha256:{'1' * 64}"})
    keep = {"CLOUDSDK_CORE_PROJECT": "my-project", "NO_GCE_CHECK": "true", "HOME": str(job.folder)}
    for argv in (("vertex", "job.yaml"), ("status", "job"), ("cancel", "job")):
        ran = launch(*argv, env={**keep, "DOCKER_CONFIG": "/nonexistent"}, cwd=job.folder)
        assert (ran.code, ran.out) == (4, "")
        assert "gcloud auth application-default login" in ran.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--dry-run", "--detach"), "--detach cannot be combined with --dry-run"),
        (("--new", "--run-id", "x"), "--run-id cannot be combined with --new"),
        (("--detach", "--watch-for", "1m"), "--detach watches nothing"),
        (("--watch-for", "soon"), "--watch-for: invalid duration 'soon'"),
        (("--resume", "--detach"), "--resume needs a run, not '--detach'"),
        (("--resume", "x", "--new"), "--resume cannot be combined with --new"),
    ],
)
def test_conflicting_flags_are_refused(job: Job, words: tuple[str, ...], problem: str) -> None:
    assert problem in job.launch("vertex", "job.yaml", *words, code=2).err
    assert not job.cloud.requests


def test_only_a_run_that_was_launched_can_be_resumed(job: Job) -> None:
    for words in (("job.yaml", "--resume", "nosuch-12345678"), ("--resume", "nosuch-12345678")):
        assert "no run nosuch-12345678" in job.launch("vertex", *words, code=2).err
    assert not job.created


def test_an_unreadable_secret_ends_the_run_at_the_first_attempt(job: Job) -> None:
    """What the node says at its end is what is told, and no other machine is paid for."""
    end = Stage("JOB_STATE_FAILED", 60, (3, "The replica workerpool0-0 exited with a non-zero status of 70."))
    job.cloud.jobs.script = (*RUNS, end)
    run = job.data("vertex", "job.yaml", "--detach")
    words = "node 0: secret HF_TOKEN (projects/p/secrets/hf/versions/latest) does not exist"
    job.cloud.logs.write(run["job"].rpartition("/")[2], "workerpool0-0", f"launch: {words} (exit code 70)")
    ran = job.launch("vertex", "job.yaml", code=1)
    assert f"{run['run']}: [workerpool0-0] {words}" in ran.err
    assert len(job.created) == 1


def test_new_beside_an_active_run_says_so(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    first = job.data("vertex", "job.yaml", "--detach")["run"]
    ran = job.launch("vertex", "job.yaml", "--new", "--detach")
    assert f"{first} is " in ran.err
    assert "starting another run" in ran.err


def test_five_modules_lie_between_the_command_and_the_request(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.services import vertex as backend

    passed: list[str] = []
    message_of = backend.message_of

    def recorded(body: Any) -> Any:
        modules = [frame.frame.f_globals["__name__"] for frame in reversed(inspect.stack()[1:])]
        passed[:] = dict.fromkeys(modules[modules.index("launcher.cli.commands.vertex") :])
        return message_of(body)

    monkeypatch.setattr(backend, "message_of", recorded)
    job.launch("vertex", "job.yaml")
    assert passed == [
        "launcher.cli.commands.vertex",
        "launcher.cli.flows.launch",
        "launcher.runs.driver",
        "launcher.services.router",
        "launcher.services.vertex",
    ]

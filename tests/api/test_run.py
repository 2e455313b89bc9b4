"""A run from Python, as an Airflow task uses it: plan, submit, wait, metrics, cancel, and the failures of each."""

from __future__ import annotations

import io
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher import api
from launcher.errors import JobFailed, LaunchError, NoCapacity, NotAuthorised, SpecError, StillRunning, UsageError
from launcher.runs.driver import AttemptFailed, AttemptStarted
from launcher.runs.endings import RunEnded
from launcher.runs.find import NoSuchRun
from launcher.runs.watch import StateChanged
from launcher.testing.googlecloud import FakeClock, Fault, Status
from tests.cli.cloudjobs import CREATE, FAILED, FULL, RUNS, WAITS, Job, scripts
from tests.cli.commands.test_export import save, weight
from tests.runs.vm_runs import VmSite, exits, is_preempted


def write_metrics(user: Job, run: str, *rows: dict[str, Any]) -> None:
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    user.cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.metrics_part(1, 0, 0, 0)}", text)


def test_plan_submit_wait_metrics(user: Job, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    plan = api.plan("job.yaml", changes={"run.config.steps": 20})
    assert not user.cloud.requests, "a plan sends nothing"
    assert (plan.project, plan.target, plan.folder) == ("my-project", "vertex", f"gs://my-bucket/runs/{plan.run}")
    assert plan.data.spec["run"]["config"] == {"steps": 20}
    run = api.submit(plan)
    assert run.metrics() is None
    write_metrics(user, run.id, {"event": "start"}, {"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0})
    seen: list[Any] = []
    ended = run.wait(on_event=seen.append)
    assert (ended.state, ended.has_ended, ended.run) == ("SUCCEEDED", True, plan.run)
    assert [one.end.kind for one in ended.attempts if one.end] == ["succeeded"]
    assert [one.job.state for one in seen if isinstance(one, StateChanged)][-1] == "SUCCEEDED"
    results = run.metrics()
    assert results is not None
    assert [row["loss"] for row in results.rows] == [2.5, 2.0]
    assert handlers == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    assert capfd.readouterr() == ("", ""), "nothing prints"


def test_a_plan_is_that_of_the_command(user: Job) -> None:
    planned = api.plan("job.yaml", changes={"machine.gpus": 4}).to_dict()
    assert planned == user.data("vertex", "job.yaml", "--gpus", "4", "--dry-run")


def test_a_second_submit_finds_the_same_run(user: Job) -> None:
    user.cloud.jobs.script = RUNS
    first, second = (api.submit(api.plan("job.yaml")) for _ in range(2))
    assert (first.id, first.status().job.name) == (second.id, second.status().job.name)
    assert len(user.created) == 1
    with pytest.raises(UsageError):
        api.submit(api.plan("job.yaml", changes={"run.config.steps": 11}, run_id=first.id))  # another computation


def test_a_run_that_succeeded_is_returned_and_a_new_one_has_the_next_number(user: Job) -> None:
    first = api.submit(api.plan("job.yaml"))
    first.wait()
    assert api.submit(api.plan("job.yaml")).wait().state == "SUCCEEDED"
    assert len(user.created) == 1
    assert api.submit(api.plan("job.yaml"), new=True).id == f"{first.id}-2"


def test_cancel(user: Job) -> None:
    user.cloud.jobs.script = RUNS
    run = api.submit(api.plan("job.yaml"))
    cancelled = run.cancel()
    assert (cancelled.done, [job.state for job in cancelled.jobs]) == (True, ["CANCELLED"])
    assert run.cancel().done is False
    with pytest.raises(RunEnded):
        run.wait()
    with pytest.raises(RunEnded):
        api.submit(api.plan("job.yaml"))
    user.cloud.jobs.script = RUNS
    assert api.submit(api.plan("job.yaml"), resume=True).status().state != "CANCELLED"


def test_cancel_of_somebody_elses_run(user: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    user.cloud.jobs.script = RUNS
    run = api.submit(api.plan("job.yaml"))
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "somebody@example.com")
    with pytest.raises(UsageError):
        api.find(run.id).cancel()
    assert run.status().has_ended is False
    assert api.find(run.id).cancel(of_another=True).done


def test_a_run_that_another_program_submitted(user: Job) -> None:
    scripts(user.cloud, FULL, RUNS)
    submitted = api.submit(api.plan("job.yaml"))
    found = api.find(submitted.id)
    assert (found.id, found.folder) == (submitted.id, submitted.folder)
    with pytest.raises(StillRunning):
        found.wait(timeout=60)  # the stored plan is trusted, so the second attempt was submitted
    assert len(user.created) == 2
    with pytest.raises(NoSuchRun):
        api.find("nothing-0123abcd")


def test_a_failed_job(user: Job) -> None:
    user.cloud.jobs.script = FAILED
    run = api.submit(api.plan("job.yaml"))
    with pytest.raises(JobFailed) as failed:
        run.wait()
    assert failed.value.exit_code == 3
    assert run.status().state == "FAILED"


def test_a_quota_refusal_in_every_place(user: Job) -> None:
    metric = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"
    words = f"The following quota metrics exceed quota limits: {metric}"
    user.cloud.faults.add(Fault(CREATE, Status(429, message=words), times=None))
    with pytest.raises(NoCapacity) as refused:
        api.submit(api.plan("job.yaml"))
    assert metric in str(refused.value)
    assert len(user.created) == 4


def test_a_wait_tries_the_next_place(user: Job) -> None:
    scripts(user.cloud, FULL, RUNS)
    seen: list[Any] = []
    run = api.submit(api.plan("job.yaml"), on_event=seen.append)
    with pytest.raises(StillRunning):
        run.wait(timeout=60, on_event=seen.append)
    assert [one.diagnosis.kind for one in seen if isinstance(one, AttemptFailed)] == ["stockout"]
    assert {one.number for one in seen if isinstance(one, AttemptStarted)} == {1, 2}


def test_a_timeout(user: Job, clock: FakeClock) -> None:
    user.cloud.jobs.script = WAITS
    run, before = api.submit(api.plan("job.yaml")), clock()
    with pytest.raises(StillRunning):
        run.wait(timeout=90)
    assert 90 <= clock() - before < 130
    assert run.status().state == "PENDING"


def test_a_preempted_run_on_vms_resumes_in_another_zone(
    user: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = VmSite(user.cloud, clock, [is_preempted, exits(0)])
    monkeypatch.setattr("launcher.clock.REAL", site.time)
    user.write(zones=["us-central1-a", "us-central1-b"], regions=None, provisioning=["spot"])
    run = api.submit(api.plan("job.yaml", target="vm"), preflight=False)
    ended = run.wait()
    assert ended.state == "SUCCEEDED"
    assert [one.end.kind for one in ended.attempts if one.end] == ["preempted", "succeeded"]
    assert run.status().state == "SUCCEEDED"  # its VMs are deleted: the folder knows


def test_logs(user: Job) -> None:
    user.cloud.jobs.script = RUNS
    run = api.submit(api.plan("job.yaml"))
    assert list(run.logs(tail=5)) == []


def test_export_of_a_checkpoint(user: Job) -> None:
    run = api.submit(api.plan("job.yaml"))
    with pytest.raises(LaunchError, match="no checkpoint yet"):
        run.export("torch")
    for step in (10, 20):
        save(open_storage(run.folder or ""), step)
    done = run.export("torch")
    assert done.url == str(user.folder / f"{run.id}-step-20-torch")
    assert set(done.files) == {"config.json", "model.pt"}
    assert weight(Path(done.url)) == 5 * 20
    older = api.find(run.id).export("torch", step=10, output=user.folder / "older")
    assert weight(Path(older.url)) == 5 * 10
    assert run.export("torch", output="gs://my-bucket/models/a").url == "gs://my-bucket/models/a"


def test_an_export_that_is_refused(user: Job) -> None:
    run = api.submit(api.plan("job.yaml"))
    save(open_storage(run.folder or ""), 10)
    with pytest.raises(UsageError, match="gguf"):
        run.export("gguf")  # type: ignore[arg-type]  # must fail
    with pytest.raises(LaunchError, match="it has 10"):
        run.export("torch", step=7)
    (user.folder / "full").mkdir()
    (user.folder / "full" / "a").touch()
    with pytest.raises(UsageError, match="not empty"):
        run.export("torch", output="full")


def test_no_credentials(user: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    user.cloud.faults.add(Fault(CREATE, Status(403), times=None))
    with pytest.raises(NotAuthorised) as refused:
        api.submit(api.plan("job.yaml"))
    assert refused.value.exit_code == 4


def test_in_threads(user: Job) -> None:
    """Two runs at once, as in a task pool: neither mixes with the other, and no handler is set outside the main
    thread."""
    plans = [api.plan("job.yaml", changes={"run.config.steps": steps}) for steps in (11, 12)]
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(lambda plan: api.submit(plan).wait(), plans))
    assert [one.state for one in ended] == ["SUCCEEDED", "SUCCEEDED"]
    assert {one.run for one in ended} == {plan.run for plan in plans}


# --- Specs -----------------------------------------------------------------------------------------------------------


def test_a_dict_is_the_same_run_as_its_file(user: Job) -> None:
    fields = json.loads((user.folder / "job.yaml").read_text())
    of_file, of_dict = api.plan("job.yaml"), api.plan(fields)
    assert of_dict.run == of_file.run
    assert of_dict.requests == of_file.requests
    assert api.plan(of_file.inputs.spec).requests == of_file.requests  # a JobSpec


def test_all_problems_of_a_dict_at_once() -> None:
    with pytest.raises(SpecError) as wrong:
        api.plan({"machine": {"gpuz": 2}, "limits": {"hours": "soon"}}, changes={"nmae": "x"})
    assert {(one.where, one.what.split(";")[0].split(":")[0]) for one in wrong.value.problems} == {
        ("spec", "unknown setting machine.gpuz"),
        ("spec", "limits.hours"),
        ("changes['nmae']", "unknown setting nmae"),
        ("spec", "machine.type"),
    }


def test_the_folder_of_a_dict(user: Job) -> None:
    (user.folder / "mine.py").write_text("print(1)\n")
    fields = {"name": "mine", "machine": {"type": "l4"}, "run": {"script": "mine.py"}}
    with pytest.raises(UsageError, match=r"image\.code"):
        api.plan(fields, target="local")
    assert "mine.py" in [file.name for file in api.plan(fields, target="local", folder=".").inputs.source.code]


def test_nothing_reads_from_or_asks_the_terminal(user: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert api.submit(api.plan("job.yaml")).wait().state == "SUCCEEDED"

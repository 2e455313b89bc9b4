"""Under `-o json` every command prints one JSON document, also when it fails; stderr keeps the text for people."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launcher.cli.commands import bench
from launcher.cli.options import Output
from launcher.cli.ui.documents import output_of
from launcher.clock import Clock
from launcher.errors import JobFailed
from launcher.plan import build
from launcher.signals import Stopped
from launcher.testing.googlecloud import FakeClock, Fault, Status
from tests.cli.cloudjobs import FAILED, RUNS, Job
from tests.command import Ran, launch

ERROR = {"problem", "hint", "exit_code"}


def error_of(ran: Ran) -> dict[str, Any]:
    """The error in a command's one document."""
    error: dict[str, Any] = json.loads(ran.out)["error"]
    assert error.keys() >= ERROR
    assert error["exit_code"] == ran.code
    assert error["problem"]
    assert error["problem"].splitlines()[0] in ran.err
    return error


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("vertex", "--nosuch"), "--nosuch"),
        (("vertex", "--gpus", "many"), "many"),
        (("metrics",), "RUN"),
        (("nosuch",), "nosuch"),
        (("vm", "nosuch"), "nosuch"),
        (("vm", "delete", "x"), "-o"),
        (("status", "--region", "us-centrl1"), "us-centrl1"),
        (("vertex", "missing.yaml", "--dry-run"), "missing.yaml"),
        (("local", "--type", "nosuch"), "nosuch"),
        (("bench", "--only", "foo"), "foo"),
    ],
)
@pytest.mark.parametrize("flag", [("-o", "json"), ("-ojson",)])
def test_a_usage_error_is_json(tmp_path: Path, argv: tuple[str, ...], problem: str, flag: tuple[str]) -> None:
    ran = launch(*argv, *flag, cwd=tmp_path)
    error = error_of(ran)
    assert (ran.code, set(error), problem in error["problem"]) == (2, ERROR, True), ran.shown
    assert launch(*argv, cwd=tmp_path).out == ""


def test_a_spec_error_has_all_its_problems(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: Bad\nmachine: {typ: h100}\n")
    error = error_of(launch("vertex", "bad.yaml", "-o", "json", cwd=tmp_path))
    assert ["bad.yaml:1" in error["problem"], "bad.yaml:2" in error["problem"]] == [True, True]


def test_json_has_the_same_hint_as_stderr(tmp_path: Path) -> None:
    ran = launch("vertex", "--type", "l4", "--dry-run", "-o", "json", env={"CLOUDSDK_CORE_PROJECT": ""})
    assert error_of(ran)["hint"] in ran.err
    assert "gcloud config set project" in ran.err


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["logs", "-fo", "json"], "json"),
        (["status", "-o", "yaml"], "yaml"),
        (["status", "-o", "text", "-o", "json"], "json"),
        (["status", "-o", "jsn"], "text"),
        (["status", "-o"], "text"),
        (["ssh", "dev", "--", "cmd", "-o", "json"], "text"),
        (["local", "--output", "json"], "text"),
        ([], "text"),
    ],
)
def test_the_output_that_a_command_line_asks_for(argv: list[str], output: str) -> None:
    assert output_of(argv) is Output(output)


def test_an_unexpected_exception_is_json_and_its_traceback_stays_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(build, "plan", broken)
    ran = launch("vertex", "--type", "l4", "--dry-run", "-o", "json")
    error = json.loads(ran.out)["error"]
    assert (ran.code, error["exit_code"], set(error)) == (1, 1, ERROR)
    assert "ZeroDivisionError: of ours" in error["problem"]
    assert "Traceback" in ran.err
    with pytest.raises(ZeroDivisionError):
        launch("vertex", "--type", "l4", "--dry-run")


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (Stopped(signal.SIGTERM), 143)])
def test_an_interrupt_reports_what_keeps_running(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, stop: BaseException, code: int
) -> None:
    job.cloud.jobs.script = RUNS

    def sleep(_: float) -> None:
        raise stop

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    ran = job.launch("vertex", "job.yaml", "-o", "json", code=code)
    data = json.loads(ran.out)
    error = data["error"]
    assert (error["exit_code"], set(error), data["state"]) == (code, ERROR, "QUEUED")
    assert "launch follow job-" in error["hint"]
    assert "launch follow job-" in ran.err


def test_a_job_that_failed_is_one_document(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    ran = job.launch("vertex", "job.yaml", "-o", "json", code=3)
    data = json.loads(ran.out)
    assert (data["state"], data["error"]["exit_code"]) == ("FAILED", 3)
    assert data["error"].keys() == ERROR | {"code", "message"}  # Google's own words stay
    assert error_of(ran)["problem"] in ran.err
    assert '"FAILED"' not in job.launch("vertex", "job.yaml", code=3).out


def test_a_watch_that_ends_early_is_one_document(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    data = json.loads(job.launch("vertex", "job.yaml", "--watch-for", "30s", "-o", "json", code=6).out)
    assert (data["state"], data["error"]["exit_code"]) == ("RUNNING", 6)


def test_a_cancel_that_fails_in_part_is_one_document(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    listing = "aiplatform.projects.locations.customJobs.list"
    job.cloud.faults.add(Fault(listing, Status(403), name="us-east4", times=None))
    two = ("--region", "us-central1", "--region", "us-east4")
    data = json.loads(job.launch("cancel", run, *two, "-o", "json", code=1).out)
    assert (data["state"], data["error"]["exit_code"]) == ("CANCELLED", 1)


def test_a_bench_that_finds_a_slow_machine_is_one_document() -> None:
    with pytest.raises(JobFailed) as caught:
        bench.run_benchmark(["sh", "-c", f"echo '{{\"ok\": false}}'; exit {int(contract.Exit.UNFIT)}"], Output.json)
    assert caught.value.data == {"ok": False}


# --- launch local ----------------------------------------------------------------------------------------------------

SCRIPT = (
    "import sys\nfrom launch_train import metrics\nmetrics.log(1, loss=0.5)\nmetrics.log(2, loss=0.25)\nsys.exit(%d)\n"
)
LOCAL = {
    "run",
    "state",
    "exit_codes",
    "seconds",
    "run_folder",
    "report",
    "steps",
    "end",
    "nonfinite",
    "restarts",
    "error",
}


def rehearsed(folder: Path, script: str) -> Ran:
    (folder / "mine.py").write_text(script)
    (folder / "job.yaml").write_text("name: mine\nmachine: {type: l4}\nrun: {script: mine.py, launcher: python}\n")
    return launch("local", "job.yaml", "-o", "json", "--set", "limits.restarts=0", cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "state"), [(0, "SUCCEEDED"), (3, "FAILED")])
def test_the_end_of_a_local_script_is_json(tmp_path: Path, code: int, state: str) -> None:
    ran = rehearsed(tmp_path, SCRIPT % code)
    data = json.loads(ran.out)
    assert (ran.code, data["state"], data.keys()) == (3 if code else 0, state, LOCAL), ran.shown
    assert (data["steps"], data["end"]["step"], data["end"]["loss"]) == (2, 2, 0.25)
    assert data["seconds"] > 0
    assert bool(data["error"]) == bool(any(data["exit_codes"].values())) == bool(code)
    if code:
        error_of(ran)
    else:
        again = launch("local", "job.yaml", "-o", "json", cwd=tmp_path)
        assert json.loads(again.out) == data


def test_the_end_of_a_script_without_metrics_is_json(tmp_path: Path) -> None:
    data = json.loads(rehearsed(tmp_path, "print('done')\n").out)
    assert (data["state"], data["steps"], data["end"]["step"]) == ("SUCCEEDED", 0, None)
    assert data["end"]["time"] > 1.7e9

"""`launch status` and `launch metrics` of a run on this machine: found by its id, its name or its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.common.storage import open_storage
from launcher.rehearsal.attempts import End, lock, write_end
from launcher.rehearsal.folder_lock import lock_run_folder
from tests.cli.cloudjobs import Job
from tests.command import launch

ROW = {"step": 3, "loss": 0.5, "time": 1.7e9}
NO_CLOUD = {"CLOUDSDK_CORE_PROJECT": ""}
FACTS = {"region": "local", "zone": None, "machine": "g2-standard-12", "provisioning": "spot"}


def ended(code: int, *, seconds: float = 5.0) -> End:
    return End(exit_codes={"workerpool0-0": code}, seconds=seconds, time=1.7e9)


def make(folder: Path, *ends: End | None, rows: tuple[Mapping[str, object], ...] = (ROW,)) -> Path:
    """A run's folder with an attempt for each end (None: it has not been noted)."""
    storage = open_storage(str(folder))
    for end in ends:
        number = lock(storage, FACTS)
        if end:
            write_end(storage, number, end)
    text = b"".join(json.dumps(row).encode() + b"\n" for row in ({"event": "start", "steps": 9}, *rows))
    storage.write(contract.metrics_part(max(1, len(ends)), 0, 0, 0), text)
    return folder


@pytest.mark.parametrize("command", ["metrics", "status"])
@pytest.mark.parametrize("text", ["tiny-0123abcd", "tiny", "runs/tiny-0123abcd", "./runs/tiny-0123abcd/"])
def test_a_run_in_runs_is_found_without_a_cloud(tmp_path: Path, command: str, text: str) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    ran = launch(command, text, "-o", "json", cwd=tmp_path, env=NO_CLOUD)
    assert ran.code == 0, ran.shown
    data = json.loads(ran.out)
    assert (data["run"], data.get("folder") or data["output"]) == ("tiny-0123abcd", str(folder))


@pytest.mark.parametrize("command", ["metrics", "status"])
@pytest.mark.parametrize("text", ["a" * 300, "runs/" + "a" * 300])
def test_a_name_that_is_too_long_for_a_path_is_an_error_without_a_traceback(
    tmp_path: Path, command: str, text: str
) -> None:
    ran = launch(command, text, cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "Traceback" in ran.err) == (2, False), ran.shown


@pytest.mark.parametrize("command", ["metrics", "status"])
def test_an_id_asks_the_cloud_nothing_and_a_name_means_the_cloud_first(job: Job, command: str) -> None:
    make(job.folder / "runs" / "job-0123abcd", ended(0))
    assert job.data(command, "job-0123abcd")["run"] == "job-0123abcd"
    assert not job.cloud.requests
    assert job.data(command, "job")["run"] == "job-0123abcd"
    assert job.cloud.requests
    run = job.data("vertex", "job.yaml")["run"]
    assert job.data("status", "job")["run"] == run
    assert "job-0123abcd" in job.launch("status", "job").err
    job.launch(command, "job-0123abcd", "--region", "us-central1", code=2)


def test_without_credentials_a_name_means_the_run_here(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    ran = launch("metrics", "tiny", "-o", "json", cwd=tmp_path)
    assert (ran.code, json.loads(ran.out)["run"]) == (0, "tiny-0123abcd"), ran.shown
    assert ran.err


@pytest.mark.parametrize(
    ("ends", "state", "codes"),
    [
        ((ended(0),), "SUCCEEDED", [{"workerpool0-0": 0}]),
        ((ended(1), ended(3)), "FAILED", [{"workerpool0-0": 1}, {"workerpool0-0": 3}]),
        ((None,), "INTERRUPTED", [None]),
        ((ended(0), None), "INTERRUPTED", [{"workerpool0-0": 0}, None]),
        ((), "UNKNOWN", []),
    ],
)
def test_the_state_is_that_of_the_newest_attempt(
    tmp_path: Path, ends: tuple[End | None, ...], state: str, codes: list[object]
) -> None:
    make(tmp_path / "runs" / "tiny-0123abcd", *ends)
    ran = launch("status", "tiny-0123abcd", "-o", "json", cwd=tmp_path)
    data = json.loads(ran.out)
    assert (data["state"], [one["exit_codes"] for one in data["attempts"]]) == (state, codes)
    assert (data["progress"]["step"], data["progress"]["steps"]) == (3, 9)
    assert (data["region"], data["job"], data["jobs"], data["error"]) == ("local", None, [], None)
    shown = launch("status", "tiny-0123abcd", cwd=tmp_path)
    assert (shown.code, shown.out.startswith("tiny-0123abcd")) == (0, True)
    assert max(map(len, shown.out.splitlines())) <= 80


def test_a_run_that_is_under_way_runs(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    with lock_run_folder(folder) as ours:
        assert ours
        assert json.loads(launch("status", "tiny", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out)["state"] == "RUNNING"
    assert json.loads(launch("status", "tiny", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out)["state"] == "INTERRUPTED"


@pytest.mark.parametrize("command", ["metrics", "status"])
@pytest.mark.parametrize("text", ["/etc", "runs", ".", "runs/nothing", "/etc/hostname"])
def test_a_path_that_is_no_run_folder_is_refused(tmp_path: Path, command: str, text: str) -> None:
    make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    ran = launch(command, text, cwd=tmp_path)
    assert (ran.code, ran.out, text in ran.err) == (2, "", True)
    assert ("tiny-0123abcd" in ran.err) == text.startswith("runs")


@pytest.mark.parametrize("command", ["metrics", "status"])
def test_a_name_of_several_runs_lists_them(tmp_path: Path, command: str) -> None:
    for name in ("tiny-0123abcd", "tiny-0123abcd-2", "tiny-4567abcd", "tiny-other-0123abcd"):
        make(tmp_path / "runs" / name, ended(0))
    ran = launch(command, "tiny", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, ran.err.count("tiny-"), "tiny-other" in ran.err) == (2, 3, False)
    assert launch(command, "tiny-other", cwd=tmp_path, env=NO_CLOUD).code == 0


def test_a_folder_of_code_with_a_runs_name_is_not_in_its_way(job: Job) -> None:
    (job.folder / "job").mkdir()
    run = job.data("vertex", "job.yaml")["run"]
    assert job.data("status", "job")["run"] == run


@pytest.mark.parametrize("command", ["follow", "logs", "cancel"])
def test_the_commands_for_the_cloud_say_that_a_run_is_here(job: Job, command: str) -> None:
    make(job.folder / "runs" / "tiny-0123abcd", ended(0))
    ran = job.launch(command, "tiny-0123abcd", code=2)
    assert "launch status tiny-0123abcd" in ran.err


def test_a_run_that_is_nowhere_without_a_project(tmp_path: Path) -> None:
    ran = launch("status", "tiny", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "tiny" in ran.err, "gcloud config set project" in ran.err) == (2, True, True)

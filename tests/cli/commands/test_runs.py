"""`launch runs`: all runs in one list, on this machine and in a cloud on loopback."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher import api
from launcher.jobs.job import SWEEP_LABEL
from launcher.runs.run_list import NEWEST
from launcher.services.local.attempts import write_end
from launcher.services.local.folder_lock import lock_run_folder
from tests.cli.cloudjobs import RUNS, Job
from tests.cli.flows.test_local_runs import FACTS, NO_CLOUD, ended, make
from tests.command import launch

if TYPE_CHECKING:
    from launcher.testing.googlecloud import FakeClock

NAN = {"step": 4, "loss": None, "nonfinite": {"loss": "nan"}, "time": 1.7e9}


def listed(folder: Path, *words: str, code: int = 0) -> list[dict[str, Any]]:
    """The runs of `launch runs --local`."""
    ran = launch("runs", "--local", *words, "-o", "json", cwd=folder, env=NO_CLOUD)
    assert ran.code == code, ran.shown
    found: list[dict[str, Any]] = json.loads(ran.out)["runs"]
    return found


def begin(folder: Path, at: float, **more: Any) -> Path:
    """A run whose only attempt began `at`, and has not ended."""
    storage = open_storage(str(folder))
    storage.write(runfolder.attempt_lock(1), json.dumps({**FACTS, "time": at, **more}).encode(), create=True)
    return folder


def test_local_runs_are_listed_newest_first_without_a_cloud(tmp_path: Path) -> None:
    now = time.time()
    begin(tmp_path / "runs" / "old-0123abcd", now - 7200, labels={"team": "vision", "x": "1"})
    begin(tmp_path / "runs" / "future-0123abcd", now + 3600)  # its clock has jumped back since
    make(tmp_path / "runs" / "new-0123abcd", ended(0), rows=({"step": 3, "loss": 0.5, "time": 1.7e9}, NAN))
    (tmp_path / "runs" / "no-run" / "inside").mkdir(parents=True)
    rows = listed(tmp_path)
    assert [one["run"] for one in rows] == ["future-0123abcd", "new-0123abcd", "old-0123abcd"]
    new = rows[1]
    assert (new["state"], new["target"], new["owner"], new["usd"], new["problem"]) == (
        *("SUCCEEDED", "local", "me"),
        *(None, None),
    )
    assert (new["progress"]["step"], new["progress"]["steps"], new["progress"]["loss"]) == (4, 9, None)
    assert new["progress"]["nonfinite"] == {"loss": "nan"}
    assert rows[2]["labels"] == {"team": "vision", "x": "1"}
    ran = launch("runs", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "4/9" in ran.out, "nan" in ran.out, len(ran.out.splitlines())) == (0, True, True, 5)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert len(ran.err.splitlines()) == 1
    assert "gcloud config set project" in ran.err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--state", "interrupted"], {"old", "future"}),
        (["--state", "Running", "--state", "succeeded"], {"new"}),
        (["--name", "old"], {"old"}),
        (["--name", "*-0123abcd"], {"old", "new", "future"}),
        (["--label", "team=vision"], {"old"}),
        (["--label", "team=audio"], set()),
        (["--label", "team"], {"old"}),
        (["--since", "1h"], {"new", "future"}),
        (["--mine"], {"old", "new", "future"}),
    ],
)
def test_filters(tmp_path: Path, words: list[str], names: set[str]) -> None:
    now = time.time()
    begin(tmp_path / "runs" / "old-0123abcd", now - 7200, labels={"team": "vision"})
    begin(tmp_path / "runs" / "future-0123abcd", now + 3600)
    make(tmp_path / "runs" / "new-0123abcd", ended(0))
    assert {one["run"].partition("-")[0] for one in listed(tmp_path, *words)} == names


@pytest.mark.parametrize(
    "words",
    [
        *(["--local", "--cloud"], ["--folder", ".", "--region", "us-central1"], ["--folder", "nowhere"]),
        *(["--state", "runing"], ["--label", "=x"], ["--since", "soon"]),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, words: list[str]) -> None:
    assert launch("runs", *words, cwd=tmp_path, env=NO_CLOUD).code == 2


def damage_lock(folder: Path) -> None:
    (folder / runfolder.attempt_lock(1)).write_text('{"time": 17')


def damage_end(folder: Path) -> None:
    (folder / runfolder.attempt_end(1)).write_text('{"exit_codes": 3}')


def not_a_folder(folder: Path) -> None:
    shutil.rmtree(folder / runfolder.METRICS)
    (folder / runfolder.METRICS).write_text("a file")


def damage_time(folder: Path) -> None:
    (folder / runfolder.attempt_lock(1)).write_text('{"time": "noon", "labels": 3}')


def test_a_run_without_readable_metrics_keeps_its_state(tmp_path: Path) -> None:
    not_a_folder(make(tmp_path / "runs" / "bad-0123abcd", ended(0)))
    (run,) = listed(tmp_path)
    assert (run["state"], run["problem"]) == ("SUCCEEDED", "unreadable: Not a directory")
    shown = launch("status", "bad-0123abcd", cwd=tmp_path, env=NO_CLOUD)
    assert (shown.code, shown.out.startswith("bad-0123abcd  succeeded")) == (0, True)


@pytest.mark.parametrize("damage", [damage_lock, damage_end, damage_time])
def test_a_damaged_run_does_not_affect_the_others(tmp_path: Path, damage: Any) -> None:
    damage(make(tmp_path / "runs" / "bad-0123abcd", ended(0)))
    make(tmp_path / "runs" / "good-0123abcd", ended(0))
    found = {one["run"]: one for one in listed(tmp_path)}
    assert found["good-0123abcd"]["state"] == "SUCCEEDED"
    assert found["bad-0123abcd"]["problem"].startswith("unreadable: ")
    ran = launch("runs", "--local", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "bad-0123abcd: unreadable: " in ran.out) == (0, True), ran.shown
    assert max(map(len, ran.out.splitlines()[:3])) <= 80
    shown = launch("status", "bad-0123abcd", cwd=tmp_path, env=NO_CLOUD)
    page = " ".join(shown.out.split())
    assert (shown.code, "bad-0123abcd unknown" in page, "launch rm runs/bad-0123abcd" in page) == (0, True, True)
    assert f"problem {found['bad-0123abcd']['problem']}" in page
    data = launch("status", "bad-0123abcd", "-o", "json", cwd=tmp_path, env=NO_CLOUD)
    assert (json.loads(data.out)["state"], "unreadable: " in data.err) == ("UNKNOWN", True)
    launch("rm", "bad-0123abcd", "--yes", cwd=tmp_path, env=NO_CLOUD)
    assert not (tmp_path / "runs" / "bad-0123abcd").exists()


def test_half_written_folders_and_odd_rows_have_a_state(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "runs" / "plan-0123abcd"))
    storage.write(runfolder.PLAN, b"{}")
    folder = make(tmp_path / "runs" / "odd-0123abcd", None, ended(1), rows=())  # two attempts; the first never ended
    text = (
        b'{"step": true, "loss": 1}\n{"step": 7, "loss": 2.5}\n{"event": "eval", "step": 7}\n'
        + b"[" * 9000
        + b'\n{"step": 8, "lo'
    )
    (folder / runfolder.metrics_part(2, 0, 0, 1)).write_bytes(text)
    (folder / runfolder.metrics_part(2, 0, 0, 2)).write_bytes(b'{"event": "end"}\n')
    (tmp_path / "runs" / ".tmp-rm-gone-0123abcd" / runfolder.ATTEMPTS).mkdir(parents=True)  # is being deleted
    begin(tmp_path / "runs" / "\x1b[2Jmoved", 1.0)
    assert "\x1b" not in launch("runs", "--local", cwd=tmp_path, env=NO_CLOUD).out
    shutil.rmtree(tmp_path / "runs" / "\x1b[2Jmoved")
    found = {one["run"]: one for one in listed(tmp_path)}
    assert {name: one["state"] for name, one in found.items()} == {"plan-0123abcd": "UNKNOWN", "odd-0123abcd": "FAILED"}
    assert (found["odd-0123abcd"]["progress"]["step"], found["odd-0123abcd"]["progress"]["loss"]) == (7, 2.5)
    with lock_run_folder(folder):
        assert {one["state"] for one in listed(tmp_path)} == {"UNKNOWN", "RUNNING"}


def test_only_the_end_of_a_long_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.runs.local_progress.TAIL_BYTES", 200)
    rows = tuple({"step": step, "loss": 1.0 / step, "time": 1.7e9 + step} for step in range(1, 500))
    make(tmp_path / "runs" / "tiny-0123abcd", ended(0), rows=rows)
    read = 0
    from launcher.runs import local_progress

    last_lines = local_progress.last_lines

    def counted(path: Path) -> list[bytes]:
        nonlocal read
        lines = last_lines(path)
        read += sum(map(len, lines))
        return lines

    monkeypatch.setattr(local_progress, "last_lines", counted)
    assert [(one["progress"]["step"], one["progress"]["steps"]) for one in listed(tmp_path)] == [(499, 9)]
    assert 0 < read <= 200


def test_python_lists_the_same_runs(tmp_path: Path) -> None:
    make(tmp_path / "new-0123abcd", ended(0))
    begin(tmp_path / "old-0123abcd", time.time() - 7200, labels={"team": "vision"})
    found = api.runs("local", folder=tmp_path)
    assert ([run.run for run in found.runs], found.unlisted) == (["new-0123abcd", "old-0123abcd"], None)
    assert [run.run for run in api.runs("local", folder=tmp_path, labels={"team": None}).runs] == ["old-0123abcd"]
    assert not api.runs("local", folder=tmp_path / "nowhere").runs


def test_the_runs_of_a_sweep_are_one_row(tmp_path: Path) -> None:
    now = time.time()
    labels = {SWEEP_LABEL: "lr-1a2b"}
    for number, loss in enumerate((2.5, float("nan"), 1.5)):
        folder = begin(tmp_path / "runs" / f"ck-0000000{number}", now + number, labels=labels)
        row = {"step": 9, "loss": loss} if loss == loss else {"step": 9, "loss": None, "nonfinite": {"loss": "nan"}}
        open_storage(str(folder)).write(runfolder.metrics_part(1, 0, 0, 0), json.dumps(row).encode())
        if number:
            write_end(open_storage(str(folder)), 1, ended(number - 1))
    begin(tmp_path / "runs" / "own-0123abcd", now - 60)
    points = [{"run": f"ck-0000000{number}", "set": {}} for number in range(5)]
    record = {"sweep": "lr-1a2b", "points": points}
    open_storage(str(tmp_path / "runs")).write("sweeps/lr-1a2b.json", json.dumps(record).encode())
    data = json.loads(launch("runs", "--local", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out)
    (sweep,) = data["sweeps"]
    assert (len(data["runs"]), sweep["name"], sweep["finished"], sweep["active"]) == (4, "lr-1a2b", 1, 0)
    assert sweep["points"] == 5, "two have not begun"
    assert sweep["best"] == {"run": "ck-00000002", "loss": 1.5}
    assert sweep["runs"] == ["ck-00000002", "ck-00000001", "ck-00000000"]
    shown = launch("runs", "--local", cwd=tmp_path, env=NO_CLOUD).out
    first = shown.splitlines()[1]
    assert all(text in first for text in ("lr-1a2b", "1 of 5 succeeded", "1.5"))
    assert ("ck-0" in shown, "own-0123abcd" in shown) == (False, True)
    listed_points = launch("runs", "--local", "--label", f"{SWEEP_LABEL}=lr-1a2b", cwd=tmp_path, env=NO_CLOUD).out
    assert (listed_points.count("ck-0000000"), "own" in listed_points, "nan" in listed_points) == (3, False, True)


# --- The cloud -------------------------------------------------------------------------------------------------------


def progress(job: Job, run: str, row: dict[str, Any]) -> None:
    """Write a run's progress record, as its trainer does."""
    storage = open_storage(f"gs://my-bucket/runs/{run}")
    storage.write(runfolder.PROGRESS, json.dumps({"attempt": 1, "steps": 10, "row": row}).encode())


def test_both_kinds_are_in_one_list(job: Job, clock: FakeClock) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    clock.advance(60)
    make(job.folder / "runs" / "tiny-0123abcd", ended(0))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job.env.items():
            patch.setenv(name, value)
        progress(job, run, {"step": 4, "loss": 1.5, "time": clock()})
    data = job.data("runs")
    found = {one["run"]: one for one in data["runs"]}
    cloud = found[run]
    assert data["unlisted"] is None
    assert {one["target"] for one in found.values()} == {"local", "vertex"}
    assert (cloud["state"], cloud["owner"], cloud["progress"]["step"], cloud["progress"]["steps"]) == (
        *("RUNNING", "me"),
        *(4, 10),
    )
    assert cloud["usd"] > 0
    assert cloud["job"].startswith("projects/")
    assert [one["run"] for one in job.data("status")["runs"]] == [one["run"] for one in data["runs"]]
    assert [one["run"] for one in job.data("runs", "--cloud")["runs"]] == [run]
    assert [one["run"] for one in job.data("runs", "--region", "us-central1")["runs"]] == [run]
    shown = job.launch("runs").out
    assert all(text in shown for text in (run, "tiny-0123abcd", "4/10", "1 active", "$"))
    assert max(map(len, shown.splitlines())) <= 80
    before = len(job.cloud.requests)
    job.launch("runs", "--local")
    assert len(job.cloud.requests) == before


def test_without_credentials_the_local_runs_are_listed(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    env = {"GOOGLE_APPLICATION_CREDENTIALS": "/nonexistent.json"}
    ran = launch("runs", cwd=tmp_path, env=env)
    assert (ran.code, "tiny-0123abcd" in ran.out, len(ran.err.splitlines())) == (0, True, 1), ran.shown
    data = json.loads(launch("runs", "-o", "json", cwd=tmp_path, env=env).out)
    assert (len(data["runs"]), bool(data["unlisted"]["problem"])) == (1, True)
    assert launch("runs", "--cloud", cwd=tmp_path, env=env).code != 0


def test_a_cloud_that_does_not_answer_does_not_hold_up_the_list(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    make(job.folder / "runs" / "tiny-0123abcd", ended(0))
    answered = threading.Event()

    def never(*_: object) -> list[Any]:
        answered.wait(20)
        return []

    monkeypatch.setattr("launcher.runs.run_list.list_cloud", never)
    monkeypatch.setattr("launcher.runs.run_list.CLOUD_SECONDS", 0.01)
    data = job.data("runs")
    answered.set()
    assert ([one["run"] for one in data["runs"]], "no answer" in data["unlisted"]["problem"]) == (
        ["tiny-0123abcd"],
        True,
    )


def test_many_runs_in_the_cloud_take_few_requests(job: Job, clock: FakeClock) -> None:
    """One list for each region with GPUs and one for all VMs; one read for each active run and the newest others.

    benchmarks/runs.py lists a thousand.
    """
    body = job.data("vertex", "job.yaml", "--dry-run")["attempts"][0]["request"]
    for number in range(250):
        if number == 245:  # the others have ended
            clock.advance(1000)
            job.cloud.jobs.script = RUNS
        labels = {**body["labels"], "launch-run": f"job-{number:08x}"}
        job.cloud.jobs.submit("us-central1", {**body, "labels": labels})
    del job.cloud.requests[:]
    runs = job.data("runs")["runs"]
    assert (len(runs), sum(one["state"] == "SUCCEEDED" for one in runs)) == (250, 245)
    lists = [one for one in job.cloud.requests if one.path.endswith(("/customJobs", "/instances", "/o"))]
    assert (len(lists), len(job.cloud.requests) - len(lists)) == (29, 5 + NEWEST)


def test_the_list_of_this_machine_loads_no_library_of_google(tmp_path: Path) -> None:
    from tests.test_imports import heavy, modules_of

    make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    loaded = modules_of(
        f"import os; os.chdir({str(tmp_path)!r}); sys.argv = ['launch', 'runs', '--local']; "
        "from launcher.cli import run; run()"
    )
    assert "launcher.runs.run_list" in loaded
    assert not heavy(loaded)

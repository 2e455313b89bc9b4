"""`launch status` and `launch metrics` of a run on this machine: found by its id, its name or its path."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher.clock import Clock
from launcher.errors import LaunchError
from launcher.runs import endings
from launcher.runs.cancelling import cancel_run
from launcher.runs.find import local_run
from launcher.services.local import __main__ as supervisor
from launcher.services.local.attempts import End, lock, write_end
from launcher.services.local.folder_lock import lock_run_folder
from launcher.services.local.service import ThisMachine
from launcher.signals import Stopped, signals_stop
from launcher.testing.googlecloud import GoogleCloud
from tests.cli.cloudjobs import Job
from tests.command import Ran, launch

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
    storage.write(runfolder.metrics_part(max(1, len(ends)), 0, 0, 0), text)
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
def test_a_run_id_is_found_without_the_cloud_but_a_name_asks_it_first(job: Job, command: str) -> None:
    make(job.folder / "runs" / "job-0123abcd", ended(0))
    assert job.data(command, "job-0123abcd")["run"] == "job-0123abcd"
    assert not job.cloud.requests
    assert job.data(command, "job")["run"] == "job-0123abcd"
    assert job.cloud.requests
    job.launch(command, "job-0123abcd", "--region", "us-central1", code=2)


def test_a_name_of_runs_here_and_in_the_cloud_lists_a_command_for_each(job: Job) -> None:
    make(job.folder / "runs" / "job-0123abcd", ended(0))
    run = job.data("vertex", "job.yaml")["run"]
    for words in (["logs", "job", "--tail", "3"], ["cancel", "job"], ["follow", "job"], ["rm", "job", "--yes"]):
        hint = job.launch(*words, code=2).err
        commands = [line.partition("  #")[0].strip() for line in hint.splitlines() if line.startswith("launch ")]
        rest = " ".join(words[2:])
        newest = [] if words[0] == "rm" else ["job --last"]
        names = ["runs/job-0123abcd", run, *newest]
        assert commands == [f"launch {words[0]} {name} {rest}".strip() for name in names]
    make(old := job.folder / "runs" / "job-1123abcd")
    os.utime(old, (1, 1))
    shutil.rmtree(job.folder / "runs" / "job-0123abcd")
    assert job.data("status", "job", "--last")["run"] == run
    make(job.folder / "runs" / "job-0123abcd", ended(0))
    assert job.data("status", "job", "--last")["run"] == "job-0123abcd"
    assert job.data("status", "runs/job-0123abcd")["region"] == "local"
    assert job.data("status", run)["region"] == "us-central1"


@pytest.mark.parametrize("command", ["status", "logs", "metrics", "follow", "watch", "cancel", "report", "compare"])
def test_last_is_the_run_with_that_name_that_started_last(tmp_path: Path, command: str) -> None:
    for digest in ("0123abcd", "1123abcd"):
        make(tmp_path / "runs" / f"tiny-{digest}", ended(0))
    os.utime(tmp_path / "runs" / "tiny-0123abcd")  # a file beside the results, such as a report, makes no run newer
    names = ("tiny", "tiny") if command == "compare" else ("tiny",)
    ran = launch(command, *names, cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, f"launch {command} tiny" in ran.err, "--last" in ran.err) == (2, True, True), ran.shown
    ran = launch(command, *names, "--last", cwd=tmp_path, env=NO_CLOUD)
    assert ran.code == 0, ran.shown
    assert "tiny-0123abcd" not in ran.shown
    assert "2 runs match" not in ran.shown


def test_resume_takes_the_last_of_several_runs(tmp_path: Path) -> None:
    for digest in ("0123abcd", "1123abcd"):
        make(tmp_path / "runs" / f"tiny-{digest}", ended(1))
    ran = launch("local", "--resume", "tiny", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "--resume tiny --last" in ran.err) == (2, True), ran.shown
    ran = launch("local", "--resume", "tiny", "--last", cwd=tmp_path, env=NO_CLOUD)
    assert "tiny-1123abcd" in ran.err, ran.shown  # it has no plan
    ran = launch("local", "--last", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "--last requires --resume" in ran.err) == (2, True), ran.shown


def test_an_id_without_a_digest_may_be_in_both_places(job: Job) -> None:
    make(job.folder / "runs" / "exp1", ended(0))
    job.data("vertex", "job.yaml", "--run-id", "exp1")
    hint = job.launch("cancel", "exp1", code=2).err
    assert "launch cancel runs/exp1" in hint
    assert "launch cancel exp1 --region us-central1" in hint
    assert "nothing to do" in job.launch("cancel", "exp1", "--region", "us-central1").out


def test_without_credentials_a_name_means_the_local_run(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    ran = launch("metrics", "tiny", "-o", "json", cwd=tmp_path)
    assert (ran.code, json.loads(ran.out)["run"]) == (0, "tiny-0123abcd"), ran.shown
    assert ran.err


def test_a_spec_of_several_runs_here_says_why_the_cloud_was_not_searched(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("name: tiny\nmachine: {type: l4}\n")
    for digest in ("0123abcd", "1123abcd"):
        make(tmp_path / "runs" / f"tiny-{digest}", ended(0))
    ran = launch("status", "tiny.yaml", cwd=tmp_path, env=NO_CLOUD)
    reason = "launch: the cloud was not searched: no Google Cloud project is set (gcloud config set project PROJECT)\n"
    assert (ran.code, reason in ran.err, "error: 2 runs match tiny.yaml\n" in ran.err) == (2, True, True), ran.shown


def test_the_reason_for_not_searching_the_cloud_is_printed_once_a_day(tmp_path: Path) -> None:
    """The reason is printed by the first command; after a day, or if it changes, again."""
    make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    commands = [("status", "tiny"), ("metrics", "tiny"), ("runs",), ("status",)]
    shown = [launch(*words, cwd=tmp_path, env=env) for words in commands]
    assert [ran.code for ran in shown] == [0, 0, 0, 0]
    assert "the cloud was not searched: no credentials" in shown[0].err
    assert [ran.err for ran in shown[1:]] == ["", "", ""]
    assert shown[2].out.endswith("1 run, 0 active; the cloud was not searched\n"), "a list says that it lacks runs"
    os.utime(tmp_path / "cache" / "launch" / "not-searched", (1, 1))
    assert launch("status", "tiny", cwd=tmp_path, env=env).err == shown[0].err
    newest = launch("status", "tiny", "--last", cwd=tmp_path, env=env)
    assert newest.err == shown[0].err, "the newest run may be in the cloud"
    with GoogleCloud() as cloud:
        assert launch("status", "tiny", cwd=tmp_path, env={**env, **cloud.environ()}).err == ""
    assert launch("status", "tiny", cwd=tmp_path, env=env).err == shown[0].err, "the cloud has answered since"


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


def test_an_active_local_run_is_shown_as_running(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    with lock_run_folder(folder) as ours:
        assert ours
        assert json.loads(launch("status", "tiny", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out)["state"] == "RUNNING"
    assert json.loads(launch("status", "tiny", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out)["state"] == "INTERRUPTED"


@pytest.mark.parametrize("command", ["metrics", "status"])
@pytest.mark.parametrize("text", ["/etc", "runs", ".", "runs/nothing", "/etc/hostname"])
def test_a_path_without_a_run_is_refused(tmp_path: Path, command: str, text: str) -> None:
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
    with lock_run_folder(tmp_path / "runs" / "tiny-0123abcd-2"):  # as in the cloud, the active one is meant
        assert "tiny-0123abcd-2" in launch(command, "tiny", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out


def test_a_code_folder_with_the_runs_name_is_not_mistaken_for_it(job: Job) -> None:
    (job.folder / "job").mkdir()
    run = job.data("vertex", "job.yaml")["run"]
    assert job.data("status", "job")["run"] == run


def test_the_commands_for_a_run_take_one_here(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(0), ended(1), rows=())
    storage = open_storage(str(folder))
    storage.write(runfolder.text_part(1, 0, 0), b"old\n")
    storage.write(runfolder.text_part(2, 0, 0), b"one\ntwo\nthr")
    storage.write(runfolder.text_part(2, 0, 1), b"ee\n")

    def run(*words: str) -> Ran:
        return launch(*words, cwd=tmp_path, env=NO_CLOUD)

    assert run("logs", "tiny").out == "".join(f"[workerpool0-0] {text}\n" for text in ("old", "one", "two", "three"))
    tail = run("logs", "tiny-0123abcd", "--tail", "1", "-o", "json").out
    assert json.loads(tail)["text"] == "three"
    assert run("logs", str(folder), "--follow").out.count("\n") == 4
    assert run("logs", "tiny", "-o", "yaml").code == 2
    followed = run("follow", "tiny", "-o", "json")
    assert {"attempts", "progress", "story", "seconds", "results"} <= json.loads(followed.out).keys()
    assert "error: tiny-0123abcd: it failed" in run("follow", "tiny").err
    assert (followed.code, json.loads(followed.out)["state"], json.loads(followed.out)["error"]["exit_code"]) == (
        *(3, "FAILED"),
        3,
    )
    assert run("cancel", "tiny").out.startswith("nothing to do: tiny-0123abcd failed")
    assert json.loads(run("cancel", "tiny", "-o", "json").out)["state"] == "FAILED"
    assert not (folder / runfolder.attempt_cancel(2)).exists()


def test_a_run_that_is_running_is_followed_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.sleep))
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    storage = open_storage(str(folder))
    clock.at[3] = lambda: storage.write(runfolder.text_part(1, 0, 0), b"new\n")
    with lock_run_folder(folder):
        ran = launch("follow", "tiny", "--watch-for", "10s", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, ran.err.count("[workerpool0-0] new\n")) == (6, 1), ran.shown


def cancelled_here(folder: Path, clock: Clock) -> bool:
    """Cancel a run; return whether it was running. Raises LaunchError: it still runs."""
    run = local_run(folder)
    assert run
    run.context.clock = clock  # type: ignore[misc]  # a test's clock
    result = cancel_run(run, lambda _text: None)
    for error in result.errors:
        raise error
    return result.done


class FakeTime:
    """A clock that does things at times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], object]] = {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [one for one in self.at if one <= self.now]:
            self.at.pop(moment)()


def test_a_cancelled_run_is_stopped_by_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_SECONDS", 0.01)
    monkeypatch.setattr(endings, "POLL_SECONDS", 0.01)
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(1), None)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(cancelled_here(folder, Clock())))
    stop = supervisor.Stop()

    def work() -> None:
        with signals_stop():
            thread.start()
            time.sleep(20)

    storage = open_storage(str(folder))
    with lock_run_folder(folder), stop.deferred(), supervisor.stopped_by_cancel(storage, 2, stop):
        with pytest.raises(Stopped):
            work()
        assert (stop.reason, done) == ("cancelled", [])
    thread.join(20)
    assert done == [True]
    assert json.loads(launch("status", "tiny", "-o", "json", cwd=tmp_path, env=NO_CLOUD).out)["state"] == "CANCELLED"


def test_a_run_that_does_not_stop_is_reported(tmp_path: Path) -> None:
    clock = FakeTime()
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    with (
        lock_run_folder(folder),
        pytest.raises(LaunchError, match="is still running 1 min after it was cancelled"),
    ):
        cancelled_here(folder, Clock(clock, clock.sleep))


def test_an_unknown_run_without_a_project(tmp_path: Path) -> None:
    ran = launch("status", "tiny", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "tiny" in ran.err, "gcloud config set project" in ran.err) == (2, True, True)


def test_status_says_why_a_run_failed_and_what_to_do(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(1))
    open_storage(str(folder)).write(runfolder.text_part(1, 0, 0), b"Traceback\nValueError: bad learning rate\n")
    shown = launch("status", "tiny-0123abcd", "--events", cwd=tmp_path)
    assert (shown.code, shown.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "[workerpool0-0] ValueError: bad learning rate" in " ".join(shown.out.split())
    assert "then launch local SPEC --resume runs/tiny-0123abcd: its script starts again" in " ".join(shown.out.split())
    data = json.loads(launch("status", "tiny-0123abcd", "--events", "-o", "json", cwd=tmp_path).out)
    assert (len(data["story"]), data["usd"], data["events"][0]["kind"]) == (1, None, "start")
    assert launch("status", "--events", cwd=tmp_path).code == 2


def test_following_an_interrupted_run_prints_no_lines_again_and_invents_no_duration(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    open_storage(str(folder)).write(runfolder.text_part(1, 0, 0), b"old line\n")
    ran = launch("follow", "tiny", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, "tiny-0123abcd was interrupted\n" in ran.out, "old line" in ran.err) == (3, True, False), (
        ran.shown
    )
    to_do = json.loads(launch("status", "tiny", "-o", "json", cwd=tmp_path).out)["to_do"]
    assert to_do.startswith("launch local SPEC --resume runs/tiny-0123abcd: its script starts again")
    assert to_do in ran.err, "status and follow agree"


def test_a_run_that_vanishes_while_it_is_followed_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime()
    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.sleep))
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    clock.at[3] = lambda: shutil.rmtree(folder)
    with lock_run_folder(folder):
        ran = launch("follow", "tiny", cwd=tmp_path, env=NO_CLOUD)
    assert (ran.code, clock.now < 60, "still running" in ran.err) == (3, True, False), ran.shown


def test_a_cancellation_that_failed_does_not_disturb_the_watch(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    here = ThisMachine()
    with lock_run_folder(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.services.local.service.request_cancel", lambda _: pytest.fail("read-only"))
        with pytest.raises(pytest.fail.Exception):
            here.cancel(str(folder))
        assert here.get(str(folder)).state == "RUNNING"


def test_a_copied_run_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "copy-0123abcd")
    facts = {**FACTS, "machine": None, "labels": {"launch-run": "tiny-0123abcd"}}
    lock(open_storage(str(folder)), facts)
    ran = launch("follow", "copy", "-o", "json", cwd=tmp_path, env=NO_CLOUD)
    data = json.loads(ran.out)
    assert (data["run"], data["machine"]) == ("copy-0123abcd", None)
    assert "--resume runs/copy-0123abcd" in data["error"]["hint"]

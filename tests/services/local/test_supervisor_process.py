"""A local run and the launch that started it: whichever is killed or stopped, the replicas save and the end is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launcher.errors import LaunchError
from launcher.images.source_files import File
from launcher.services.local import client
from launcher.services.local.__main__ import Stop
from launcher.services.local.folder_lock import is_taken
from launcher.services.local.job import LocalJob
from launcher.services.local.workdirs import Code
from launcher.signals import signals_stop
from tests.command import launch
from tests.e2e.running import run, started

SAVES = """
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["LAUNCH_RUN_FOLDER"])
def save(*_):
    time.sleep(float(os.environ.get("SAVES", "0")))
    (folder / "saved").touch()
    sys.exit(int(os.environ.get("ENDS", "75")))
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
time.sleep(100)
"""


class Running:
    """A started `launch local` whose script is ready. `pid` is that of the script."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        line = next(line for line in iter(process.stderr.readline, "") if " ready " in line)  # type: ignore[union-attr]
        self.pid = int(line.split()[-1])
        self.supervisor = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])

    def end(self) -> dict[str, Any]:
        """Return the recorded end, which must come within the time to save."""
        path = self.folder / runfolder.attempt_end(1)
        until(path.exists)
        until(lambda: not is_taken(self.folder))
        end: dict[str, Any] = json.loads(path.read_text())
        return end


def until(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def running(folder: Path, code: str = SAVES, **env: str) -> Iterator[Running]:
    output = folder / "runs" / "by-hand"
    variables = [{"name": name, "value": value} for name, value in {"LAUNCH_RUN_FOLDER": str(output), **env}.items()]
    container = {"command": ["python", "-c", code], "env": variables}
    body = {"displayName": "by-hand", "jobSpec": {"workerPoolSpecs": [{"containerSpec": container}]}}
    (folder / "request.json").write_text(json.dumps(body))
    with started("local", "--request", "request.json", "-o", "json", cwd=folder) as process:
        yield Running(process, output)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_stops_launch_the_script_saves_and_its_end_is_recorded(tmp_path: Path, signum: signal.Signals) -> None:
    with running(tmp_path) as job:
        job.process.send_signal(signum)
        job.process.communicate(timeout=60)
    assert job.process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    end = job.end()
    assert (end["exit_codes"], end["stopped"]) == ({"workerpool0-0": 75}, "interrupted")
    assert (job.folder / "saved").exists()
    state = json.loads(launch("status", "by-hand", "-o", "json", cwd=tmp_path).out)
    assert (state["state"], state["ended"]) == ("INTERRUPTED", end["time"])


def test_a_stopped_script_that_exits_with_0_has_not_finished(tmp_path: Path) -> None:
    with running(tmp_path, ENDS="0") as job:
        job.process.send_signal(signal.SIGINT)
        job.process.communicate(timeout=60)
    assert job.end()["exit_codes"] == {"workerpool0-0": 0}
    with running(tmp_path, ENDS="0") as again:
        again.process.send_signal(signal.SIGINT)
        again.process.communicate(timeout=60)
    assert (job.folder / runfolder.attempt_lock(2)).exists(), "the same command continues it"


def test_a_launch_that_ignores_sigterm_is_stopped_by_ctrl_c(tmp_path: Path) -> None:
    """A supervisor inherits what its starter ignores."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with running(tmp_path) as job:
            job.process.send_signal(signal.SIGINT)
            job.process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (job.process.returncode, job.end()["stopped"]) == (130, "interrupted")


def test_an_attempt_that_cannot_start_has_failed(tmp_path: Path) -> None:
    env = [{"name": "LAUNCH_RUN_FOLDER", "value": str(tmp_path / "runs" / "by-hand")}]
    pool = {"containerSpec": {"command": ["no-such-program"], "env": env}}
    body = {"displayName": "by-hand", "jobSpec": {"workerPoolSpecs": [pool]}}
    (tmp_path / "request.json").write_text(json.dumps(body))
    ran = launch("local", "--request", tmp_path / "request.json", cwd=tmp_path)
    assert (ran.code, "no-such-program" in ran.err) == (1, True), ran.shown
    state = json.loads(launch("status", "by-hand", "-o", "json", cwd=tmp_path).out)
    assert (state["state"], "it could not be started" in str(state["story"])) == ("FAILED", True), state["story"]


def test_a_supervisor_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    files = [File(f"{'a' * 100}/{number}.py", tmp_path / str(number)) for number in range(5000)]
    with pytest.raises(LaunchError, match="the job's supervisor exited with 1"):
        client.run_job(LocalJob(request={}, code=Code(files)), lambda _event: None)


def test_signals_wait_while_an_end_is_recorded() -> None:
    stop = Stop()

    def replicas_run() -> None:
        with signals_stop():
            time.sleep(10)  # the signal is repeated

    with stop.deferred():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.reason == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            replicas_run()


def test_a_second_ctrl_c_does_not_wait_for_the_script_to_save(tmp_path: Path) -> None:
    with running(tmp_path, SAVES="60") as job:
        begun = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        job.process.send_signal(signal.SIGINT)
        job.process.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert (job.process.returncode, job.end()["exit_codes"]) == (130, {"workerpool0-0": -9})


def test_a_killed_supervisor_takes_its_replicas_with_it(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        os.kill(job.supervisor, signal.SIGKILL)
        _, err = job.process.communicate(timeout=60)
    assert (job.process.returncode, "the job's supervisor was killed by signal 9" in err) == (1, True), err
    until(lambda: not Path(f"/proc/{job.pid}").exists())
    state = json.loads(launch("status", "by-hand", "-o", "json", cwd=tmp_path).out)
    assert (state["state"], state["ended"], is_taken(job.folder)) == ("INTERRUPTED", None, False)


def test_a_cancelled_run_ends_in_both_terminals(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        cancelled = run("cancel", "by-hand", cwd=tmp_path)
        out, err = job.process.communicate(timeout=60)
    assert (cancelled.returncode, job.process.returncode) == (0, 3), cancelled.stderr + err
    assert "error: by-hand was cancelled" in err
    assert json.loads(out)["state"] == "CANCELLED"
    end = job.end()
    assert (end["exit_codes"], end["stopped"]) == ({"workerpool0-0": 75}, "cancelled")
    assert json.loads(launch("status", "by-hand", "-o", "json", cwd=tmp_path).out)["state"] == "CANCELLED"


def test_a_reader_that_has_seen_enough_stops_a_job_that_prints_on(tmp_path: Path) -> None:
    """`launch local 2>&1 | head`: more lines wait than the connection and the queue take."""
    code = SAVES.replace("(folder / ", "for _ in range(20_000): print('x' * 500)\n    (folder / ")
    with running(tmp_path, code) as job:
        begun = time.monotonic()
        assert job.process.stderr
        job.process.stderr.close()
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(60)
    assert time.monotonic() - begun < 20
    assert (job.end()["exit_codes"], job.end()["stopped"]) == ({"workerpool0-0": 75}, "interrupted")


def test_of_two_terminals_at_the_same_moment_one_runs_the_job(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        second = run("local", "--request", "request.json", cwd=tmp_path)
        assert (second.returncode, "already running on this machine" in second.stderr) == (2, True), second.stderr
        job.process.send_signal(signal.SIGINT)
        job.process.communicate(timeout=60)
    assert sorted(path.name for path in (job.folder / "attempts").iterdir()) == ["0001.end.json", "0001.json"]

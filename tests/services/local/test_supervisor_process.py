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
from launcher.services.local.folder_lock import is_taken
from tests.command import launch
from tests.e2e.running import run, started

SAVES = """
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["LAUNCH_RUN_FOLDER"])
def save(*_):
    time.sleep(float(os.environ.get("SAVES", "0")))
    (folder / "saved").touch()
    sys.exit(75)
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
def running(folder: Path, **env: str) -> Iterator[Running]:
    output = folder / "runs" / "by-hand"
    variables = [{"name": name, "value": value} for name, value in {"LAUNCH_RUN_FOLDER": str(output), **env}.items()]
    container = {"command": ["python", "-c", SAVES], "env": variables}
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
    assert (job.process.returncode, "ended with exit code -9" in err) == (1, True), err
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


def test_of_two_terminals_at_the_same_moment_one_runs_the_job(tmp_path: Path) -> None:
    with running(tmp_path) as job:
        second = run("local", "--request", "request.json", cwd=tmp_path)
        assert (second.returncode, "already running on this machine" in second.stderr) == (2, True), second.stderr
        job.process.send_signal(signal.SIGINT)
        job.process.communicate(timeout=60)
    assert sorted(path.name for path in (job.folder / "attempts").iterdir()) == ["0001.end.json", "0001.json"]

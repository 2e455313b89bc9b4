"""`launch watch`: as lines, and on a terminal with keys."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common.storage import LocalFolder
from launcher.cli.commands.watch import Messages, Screen, watch, watched_runs
from launcher.runs.watched_runs import RunWatch, WatchedRun
from launcher.services.local.attempts import lock
from launcher.services.local.folder_lock import lock_run_folder
from launcher.signals import Stopped
from launcher.testing.googlecloud import Fault, Status
from tests.cli.cloudjobs import FAILED, FULL, RUNS, WELL, Job
from tests.command import WORLD, as_process, launch
from tests.train.report.folders import preempted


def test_a_job_is_watched_to_its_end(job: Job) -> None:
    job.cloud.jobs.script = WELL
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.cloud.faults.add(Fault("aiplatform.projects.locations.customJobs.get", Status(503), times=12, after=2))
    ran = job.launch("watch", run)
    assert ran.out.startswith(f"{run}  succeeded")
    assert "job state temporarily unavailable" in ran.err
    assert "job state available again" in ran.err
    assert "\x1b" not in ran.shown
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize(("script", "hint"), [(FAILED, "--resume"), (FULL, "launch follow")])
def test_a_failed_run_fails_the_command(job: Job, script: tuple[object, ...], hint: str) -> None:
    job.cloud.jobs.script = script  # type: ignore[assignment]  # a script of this test
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    ran = job.launch("watch", run, code=3)
    assert f"error: {run} failed" in ran.err
    assert hint in ran.err
    assert len(job.created) == 1  # a watch submits nothing


def test_several_runs_have_their_names_in_each_line(tmp_path: Path) -> None:
    for name in ("run-0123abcd", "run-4567cdef"):
        preempted(tmp_path / "runs" / name)
        with lock_run_folder(tmp_path / "runs" / name):
            pass
    ran = launch("watch", "run-0123abcd", "runs/run-4567cdef", "runs/run-0123abcd", cwd=tmp_path)
    assert [line for line in ran.out.splitlines() if line.startswith("run-")] == [
        "run-0123abcd  interrupted",
        "run-4567cdef  interrupted",
    ]
    assert ran.code == 3  # nothing says that they have succeeded
    assert launch("watch", "nothing", cwd=tmp_path, env={"CLOUDSDK_CORE_PROJECT": ""}).code == 2


def test_cancelling_needs_a_confirmation(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    with as_process(["launch"], {**WORLD, **job.env}, job.folder):
        messages = Messages(are_printed=False)
        (source,) = watched_runs([run], None, messages)
        run_watch = RunWatch(source)
        run_watch.update(job=source.newest_job())
        screen = Screen([run_watch], messages)
        for keys in ("cn", "cx", "cc", "c1"):  # `cc` asks again
            assert not any(map(screen._pressed, keys))
        assert job.data("status", run)["state"] == "QUEUED"
        assert not screen._pressed("c")
        assert f"Cancel {run}?" in screen._message
        assert not screen._pressed("y")
        assert screen.background
        screen.background.join(20)
        assert screen._message == f"{run} cancelled"
        assert job.data("status", run)["state"] == "CANCELLED"
        assert screen._pressed("q")


def test_ctrl_c_during_a_cancellation_tells_that_it_was_requested(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    interrupted, threads = threading.Event(), list[threading.Thread]()

    def show(self: Screen, _until: float) -> bool:
        self._one.update(job=self._one.source.newest_job())
        for key in keys:
            self._pressed(key)
        threads.extend(self.cancelling.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchedRun, "cancel", lambda *_: interrupted.wait(20))
    monkeypatch.setattr(Screen, "show", show)
    monkeypatch.setattr("launcher.cli.commands.watch.is_terminal", lambda: True)
    keys = "cn"
    assert "nothing was cancelled" in job.launch("watch", run, code=130).err
    keys = "cy"
    ran = job.launch("watch", run, code=130)
    assert "nothing was cancelled" not in ran.err
    assert f"requested to cancel {run}; last known state: " in ran.err
    assert f"launch status {run}" in ran.err
    interrupted.set()
    threads[0].join(20)


@contextlib.contextmanager
def on_terminal() -> Iterator[int]:
    """Make a pseudo-terminal stdin and stdout; yield the descriptor of its other end."""
    master, slave = pty.openpty()
    with (
        pytest.MonkeyPatch.context() as patch,
        open(slave, "w", encoding="utf-8") as stdout,  # noqa: PTH123 - a file handle
        open(os.dup(slave), encoding="utf-8") as stdin,  # noqa: PTH123 - as above
    ):
        patch.setattr("sys.stdout", stdout)
        patch.setattr("sys.stdin", stdin)
        patch.setenv("TERM", "xterm")
        yield master
    os.close(master)


@pytest.mark.parametrize("how", ["key", "SIGTERM", "SIGINT"])
def test_the_terminal_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "run-0123abcd"
    folder.mkdir(parents=True)
    lock(LocalFolder(folder), {"region": "local"})
    drawn = bytearray()

    def act() -> None:
        while b"q quit" not in drawn:
            drawn.extend(os.read(terminal, 1 << 16))
        if how == "key":
            os.write(terminal, b"q")
        else:
            os.kill(os.getpid(), getattr(signal, how))
        while b"\x1b[?1049l" not in drawn:
            drawn.extend(os.read(terminal, 1 << 16))

    with on_terminal() as terminal, lock_run_folder(folder):
        before = termios.tcgetattr(terminal)
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        ends = {"SIGTERM": pytest.raises(Stopped), "SIGINT": pytest.raises(KeyboardInterrupt)}
        with ends.get(how, contextlib.nullcontext()):
            watch(["run-0123abcd"], watch_for=20)
        thread.join(10)
        assert termios.tcgetattr(terminal) == before
    assert b"\x1b[?1049h" in drawn
    assert b"\x1b[?25h" in drawn  # the cursor is seen again

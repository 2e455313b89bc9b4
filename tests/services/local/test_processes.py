"""Replicas as processes: exit codes, lines, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.services.local import processes, supervisor
from launcher.services.local.replicas import Replica


def replica(name: str, code: str) -> Replica:
    return Replica(name=name, image="", argv=(sys.executable, "-c", code), env={"WHO": name}, gpus=0)


def run(*replicas: Replica, folder: Path, lines: list[tuple[str, str]] | None = None) -> dict[str, int]:
    kept = lines if lines is not None else []
    env = {"PATH": os.environ["PATH"]}
    return processes.run(
        replicas, env=env, workdir=lambda _: folder, on_line=lambda *line: kept.append(line), say=print
    ).codes


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_exit_codes_and_lines(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    code = "import os,sys; print(os.environ['WHO']); sys.stdout.buffer.write(b'\\xff\\r\\n'); print('no end', end='')"
    codes = run(replica("a", code), replica("b", code), folder=tmp_path, lines=lines)
    assert codes == {"a": 0, "b": 0}
    assert sorted(lines) == sorted((who, text) for who in "ab" for text in (who, "\ufffd", "no end"))


def test_the_callers_environment_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "1")
    codes = run(replica("a", "import os,sys; sys.exit('CANARY' in os.environ)"), folder=tmp_path)
    assert codes == {"a": 0}


def test_when_one_fails_the_others_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PEERS_SECONDS", 0.3)
    codes = run(replica("a", "raise SystemExit(3)"), replica("b", "import time; time.sleep(60)"), folder=tmp_path)
    assert codes == {"a": 3, "b": -15}


def test_a_replica_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PEERS_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)
    ready = str(tmp_path / "ready")
    deaf = f"import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({ready!r}, 'w'); time.sleep(60)"
    fails = f"import os,time\nwhile not os.path.exists({ready!r}): time.sleep(0.01)\nraise SystemExit(3)"
    codes = run(replica("a", fails), replica("b", deaf), folder=tmp_path)
    assert codes["b"] == -9


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through Linux's subreaper")
def test_no_process_of_a_killed_replica_runs_beside_its_restart_or_after_the_end(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    code = (
        "import os,subprocess,sys\n"
        f"before = open({str(pids)!r}).read().split()\n"
        "running = [pid for pid in before if os.path.exists(f'/proc/{pid}')]\n"
        "nap = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"print(nap.pid, file=open({str(pids)!r}, 'a'))\n"
        "if running or len(before) == 2: os._exit(len(running))\n"
        "os.kill(os.getpid(), 9)"
    )
    seat = Replica(name="a", image="", argv=(sys.executable, "-c", code), env={"CLUSTER_SPEC": "a"}, gpus=0)
    assert run(seat, folder=tmp_path) == {"a": 0}
    assert len(pids.read_text().split()) == 3
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_an_interrupt_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    code = f"import os,time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"

    def interrupted(*_: object) -> bool:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "wait", interrupted)
    assert run(replica("a", code), replica("b", code), folder=tmp_path) == {"a": -15, "b": -15}
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert not [thread for thread in threading.enumerate() if "_read" in thread.name]


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_an_orphan_that_holds_the_pipe_open_costs_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DRAIN_SECONDS", 60)
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    )
    began = time.monotonic()
    assert run(replica("a", code), folder=tmp_path) == {"a": 0}
    assert time.monotonic() - began < 50  # a reader is waited for 60 s


LAUNCHING = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
from pathlib import Path
from launcher.services.local.processes import run
from launcher.services.local.replicas import Replica

code = "import os,time; print(os.getpid(), flush=True); time.sleep(60)"
work = Replica(name="a", image="", argv=(sys.executable, "-c", code), env={}, gpus=0)
env = {"PATH": os.environ["PATH"]}
ended = run([work], env=env, workdir=lambda _: Path("."), on_line=lambda _, line: print(line, flush=True), say=print)
sys.exit(f"stopped: {ended.stopped}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the leash is Linux's")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_who_stops_launch_stops_its_replicas(tmp_path: Path, signum: signal.Signals) -> None:
    path = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[2])}
    command = [sys.executable, "-c", LAUNCHING]
    with subprocess.Popen(
        command, cwd=tmp_path, env=path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launching:
        assert launching.stdout
        pid = int(launching.stdout.readline())
        launching.send_signal(signum)
        _, err = launching.communicate(timeout=20)
    assert err.strip() == ("" if signum == signal.SIGKILL else "stopped: True")
    until(lambda: gone(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")


def test_handlers_are_as_before(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    kept = signal.getsignal(signal.SIGTERM)
    try:
        code = "import os; os.kill(os.getppid(), 1)"
        assert run(replica("a", code), folder=tmp_path) == {"a": 0}
        assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, kept)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_in_the_folder_and_one_of_the_path(tmp_path: Path) -> None:
    (tmp_path / "own.sh").write_text("#!/bin/sh\nexit 4\n")
    (tmp_path / "own.sh").chmod(0o755)
    own, found = (Replica(name=name, image="", argv=(name,), env={}, gpus=0) for name in ("./own.sh", "true"))
    assert run(own, found, folder=tmp_path)["./own.sh"] == 4


def test_a_missing_program(tmp_path: Path) -> None:
    missing = Replica(name="a", image="", argv=("no-such-program",), env={}, gpus=0)
    with pytest.raises(LaunchError, match="no-such-program"):
        run(missing, folder=tmp_path)

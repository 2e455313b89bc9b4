"""Replicas as processes: exit codes, lines, and nothing left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.apply import processes
from launcher.apply.replicas import Replica
from launcher.errors import LaunchError


def replica(name: str, code: str) -> Replica:
    return Replica(name=name, image="", argv=(sys.executable, "-c", code), env={"WHO": name}, gpus=0)


def run(*replicas: Replica, folder: Path, lines: list[tuple[str, str]] | None = None) -> dict[str, int]:
    kept = lines if lines is not None else []
    return processes.run(
        replicas, env={"PATH": os.environ["PATH"]}, folder=folder, on_line=lambda *line: kept.append(line)
    )


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


def test_nothing_of_this_environment_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "1")
    codes = run(replica("a", "import os,sys; sys.exit('CANARY' in os.environ)"), folder=tmp_path)
    assert codes == {"a": 0}


def test_when_one_fails_the_others_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PEERS_SECONDS", 0.3)
    codes = run(replica("a", "raise SystemExit(3)"), replica("b", "import time; time.sleep(60)"), folder=tmp_path)
    assert codes == {"a": 3, "b": -15}


def test_a_replica_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PEERS_SECONDS", 0.3)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    codes = run(replica("a", "import time; time.sleep(1); raise SystemExit(3)"), replica("b", deaf), folder=tmp_path)
    assert codes["b"] == -9


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through Linux's subreaper")
def test_what_a_killed_replica_leaves_behind_is_gone_too(tmp_path: Path) -> None:
    orphan = tmp_path / "pid"
    code = (
        "import os,subprocess,sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(orphan)!r}, 'w').write(str(child.pid))\n"
        "os.kill(os.getpid(), 9)"
    )
    assert run(replica("a", code), folder=tmp_path) == {"a": -9}
    assert gone(int(orphan.read_text()))


def test_an_interrupt_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    code = f"import os,time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"

    def interrupted(started: object) -> None:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(replica("a", code), replica("b", code), folder=tmp_path)
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert not [thread for thread in threading.enumerate() if "_read" in thread.name]


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    missing = Replica(name="a", image="", argv=("no-such-program",), env={}, gpus=0)
    with pytest.raises(LaunchError, match="no-such-program"):
        run(missing, folder=tmp_path)

"""One `launch local` of a run at a time."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.services.local import folder_lock as module
from launcher.services.local.folder_lock import lock_run_folder

HOLDING = """
import sys, time
from pathlib import Path
from launcher.services.local.folder_lock import lock_run_folder
with lock_run_folder(Path(sys.argv[1])) as ours:
    print(ours, flush=True)
    time.sleep(60)
"""


def test_a_lock_is_held_until_its_process_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", HOLDING, str(folder)]
    with subprocess.Popen(command, cwd=Path(module.__file__).parents[2], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        assert first.stdout.readline() == "True\n"
        with lock_run_folder(folder) as ours:
            assert not ours
        with lock_run_folder(tmp_path / "runs" / "b") as other:
            assert other
        first.kill()
        first.wait()
        with lock_run_folder(folder) as ours:
            assert ours
    assert not list(folder.iterdir())


def test_a_child_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = "import time; print('runs', flush=True); time.sleep(60)"
    with lock_run_folder(tmp_path) as ours:
        assert ours
        child = subprocess.Popen([sys.executable, "-c", code], close_fds=False, stdout=subprocess.PIPE)
        assert child.stdout
        child.stdout.readline()  # until then it may still have all that this process has open
    with child, lock_run_folder(tmp_path) as again:
        child.kill()
        assert again


def test_a_file_system_without_locks_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run_folder(tmp_path) as first, lock_run_folder(tmp_path) as second:
        assert (first, second) == (True, True)


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="the run folder can't be used"), lock_run_folder(tmp_path / "file" / "below"):
        pass

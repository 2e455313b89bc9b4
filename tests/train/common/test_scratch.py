"""Temporary folders after kill -9."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from launch_train.common.scratch import temporary_folder

HOLD = """
import sys
from launch_train.common.scratch import temporary_folder
with temporary_folder("test") as folder:
    open(f"{folder}/file", "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process with a temporary folder, which it keeps until its stdin ends."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_kept(tmp_path: Path) -> None:
    (tmp_path / "launch-tmp-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    living, kept = hold(tmp_path)
    killed, left = hold(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert (left / "file").exists()
    third, folder = hold(tmp_path)
    assert (left.exists(), (kept / "file").exists(), (folder / "file").exists()) == (False, True, True)
    for process in (living, third):
        process.communicate("", timeout=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch-tmp-link", "other"]


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first three, one is removed before it is opened, and one before it is locked."""
    folders: list[str] = []

    def make(prefix: str, *, mkdtemp: Callable[..., str] = tempfile.mkdtemp) -> str:
        folders.append(mkdtemp(prefix=prefix, dir=tmp_path))
        if len(folders) == 1:
            Path(folders[0]).rmdir()
        return folders[-1]

    def lock(handle: int, operation: int, *, flock: Callable[[int, int], None] = fcntl.flock) -> None:
        if len(folders) == 2:
            Path(folders[1]).rmdir()
        flock(handle, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(fcntl, "flock", lock)
    with temporary_folder("test") as folder:
        assert (folder, Path(folder).exists()) == (folders[2], True)
    gc.collect()  # a forgotten TemporaryDirectory warns, which fails a test
    assert list(tmp_path.iterdir()) == []


def test_no_process_of_launch_makes_a_temporary_folder_that_nobody_removes() -> None:
    root = Path(__file__).parents[3]
    files = [*(root / "launcher").rglob("*.py"), *(root / "train" / "launch_train").rglob("*.py")]
    assert len(files) > 500
    assert [path.name for path in files if 'TemporaryDirectory(prefix="launch' in path.read_text()] == []

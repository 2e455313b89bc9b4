"""Temporary folders after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


def test_no_process_of_launch_makes_a_temporary_folder_that_nobody_removes() -> None:
    root = Path(__file__).parents[3]
    files = [*(root / "launcher").rglob("*.py"), *(root / "train" / "launch_train").rglob("*.py")]
    assert len(files) > 500
    assert [path.name for path in files if 'TemporaryDirectory(prefix="launch' in path.read_text()] == []

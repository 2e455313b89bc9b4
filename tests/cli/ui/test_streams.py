"""stdout as a separate process sees it: the same bytes under any locale, and no traceback where it can't be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT, WORLD

PLAN = "vertex --gpus 2 --type h100 --dry-run"


def shell(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`launch LINE` in a shell, where it may redirect."""
    command = f"{sys.executable} -m launcher {line}"
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env={**WORLD, **env}, capture_output=True, check=False, timeout=60
    )


@pytest.mark.slow
def test_the_same_bytes_under_any_locale() -> None:
    worlds = (
        {"LC_ALL": "C.UTF-8"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "cp1252"},  # a Windows console
    )
    seen = [shell(PLAN, **world) for world in worlds]
    assert [(one.returncode, one.stderr) for one in seen] == [(0, b"")] * len(worlds)
    assert len({one.stdout for one in seen}) == 1
    assert "≈" in seen[0].stdout.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("line", [PLAN, f"{PLAN} -o json", "schema", "--help", "--version"])
def test_a_disk_that_is_full(line: str) -> None:
    ran = shell(f"{line} >/dev/full")
    assert (ran.returncode, ran.stderr) == (1, b"error: cannot write to stdout: No space left on device\n")


def test_a_stdout_that_is_closed() -> None:
    ran = shell(f"{PLAN} >&-")
    assert ran.returncode == 1
    assert ran.stderr.startswith(b"error: stdout is closed\n")
    assert b"Traceback" not in ran.stderr


def test_a_stderr_that_is_closed() -> None:
    ran = shell("vertex missing.yaml --dry-run 2>&-")
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert shell(f"{PLAN} 2>&-").stdout == shell(PLAN).stdout


@pytest.mark.parametrize(
    ("env", "colours"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), (None, False)]
)
def test_launch_colours_its_own_words_on_a_terminal(env: dict[str, str] | None, colours: bool) -> None:
    """Errors are red, headings bold; in a pipe (None) and with NO_COLOR nothing is, and no text of others ever is."""
    import pty

    main, terminal = pty.openpty()
    world = {**os.environ, "TERM": "xterm", **(env or {})}
    code = "from launcher.cli import main; main()"
    for argv, word in ((["--help"], b"1mGet started"), (["vertex", "\x1b[32mno.yaml", "--dry-run"], b"1;31merror:")):
        piped = subprocess.run([sys.executable, "-c", code, *argv], env=world, capture_output=True, check=False)
        assert b"\x1b" not in piped.stdout + piped.stderr
        if env is not None:
            subprocess.run(
                [sys.executable, "-c", code, *argv], env=world, stdout=terminal, stderr=terminal, check=False
            )
            shown = os.read(main, 100_000)
            assert (b"\x1b[" + word in shown) == colours, shown
            assert b"\x1b[32m" not in shown
    os.close(main)
    os.close(terminal)

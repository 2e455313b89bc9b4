"""Programs whose output nobody reads to its end (`python -m launch_train.profiling.__main__ TRACE | head`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = str(Path(__file__).with_name("traces") / "gloo-2-ranks.json.gz")
UNREAD = 141  # 128 + SIGPIPE, as a shell has it
PRINTS = """
from launch_train.common.process_exit import exit_process, run_program
exit_process(run_program('x', lambda: print('a', flush=True), bool))
"""
ELSEWHERE = """
import sys
from launch_train.common.process_exit import exit_process, run_program
def work():
    raise BrokenPipeError("of a socket")
exit_process(run_program('x', work, bool))
"""


def unread(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a stdout that has no reader any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", [("-m", "launch_train.profiling.__main__", TRACE), ("-c", PRINTS)])
def test_a_reader_that_has_enough_is_no_error(words: tuple[str, ...]) -> None:
    ran = unread(*words)
    assert (ran.returncode, ran.stderr) == (UNREAD, "")


def test_a_broken_pipe_of_anything_else_is_one() -> None:
    ran = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 1
    assert "BrokenPipeError: of a socket" in ran.stderr

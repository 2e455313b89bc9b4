"""The screen of `launch watch`, and its keys."""

from __future__ import annotations

import contextlib
import os
import pty
import termios
from pathlib import Path
from typing import Any

import pytest

from launch_train.common.storage import LocalFolder
from launch_train.runfolder.run import read_run
from launcher.cli.ui.keys import single_keys
from launcher.cli.ui.watch_page import screen
from launcher.jobs.job import Job
from launcher.runs.logs.line import Line
from launcher.runs.metrics.gpu_nodes import Node
from launcher.runs.metrics.progress import Progress
from launcher.runs.run_story import RunStory
from launcher.runs.story import AttemptSummary, summarize_attempts
from launcher.runs.watched_runs import RunView
from tests.train.report.folders import T, preempted

FOOTER = "q quit"
JOB = Job(name="projects/p/locations/us-central1/customJobs/7", region="us-central1", state="RUNNING", created=T)


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    """A run whose second attempt runs."""
    folder = preempted(tmp_path)
    (folder / "attempts" / "0002.verdict.json").unlink()
    live = AttemptSummary(number=2, machine="", place="", state="running", waited=100, ran=600)
    found = summarize_attempts(read_run(LocalFolder(folder), ends_only=True), T + 1000, live)
    facts = {"gpu_util_mean": 0.97, "gpu_mem_max_gb": 60.0, "gpu_temp_max_c": 61.0, "gpu_power_mean_w": 653.0}
    return RunView(
        "run-0123abcd",
        job=JOB,
        progress=Progress(step=50, steps=200, loss=2.5, rate=1000.0, unit="tokens", eta_seconds=300, time=T + 940),
        newest_rows=[{"step": n, "loss": 5 / n, "tokens_per_s": 1000.0} for n in range(1, 51)],
        nodes=(Node(0, 120.0, 2, facts),),
        story=RunStory(found, 3.0),
        lines=tuple(Line(0.0, "workerpool0-0", f"line {n} \x1b[31m {'x' * 99}", "DEFAULT") for n in range(50)),
        trouble="no answer from aiplatform.",
    )


def shown(views: list[RunView], width: int = 80, height: int = 24, **more: Any) -> list[str]:
    lines = screen(views, 0, width, height, footer=FOOTER, now=T + 1000, **more).plain.split("\n")
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == FOOTER
    return lines


def test_one_run(view: RunView) -> None:
    text = "\n".join(shown([view]))
    for part in (
        "run-0123abcd  running  us-central1",
        "step 50 of 200",
        "25%, 4 min 0 s left",  # a minute has passed since that step
        "97% busy, up to 60.0 GB, 61 °C",
        "≈$0.70 so far of at most $3.00",
        "preempted at step 30",
        "resumed from step 25 (5 steps lost)",
        "no answer from aiplatform. Retrying",
        "[workerpool0-0] line 49",
    ):
        assert part in text
    assert "█" in next(line for line in text.splitlines() if line.startswith("loss"))


@pytest.mark.parametrize(("width", "height"), [(40, 12), (200, 60), (20, 5)])
def test_other_sizes(view: RunView, width: int, height: int) -> None:
    shown([view], width, height)
    shown([view, view, view], width, height)


def test_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with open(slave, encoding="utf-8") as stdin:  # noqa: PTH123 - a file handle
        monkeypatch.setattr("sys.stdin", stdin)
        before = termios.tcgetattr(slave)
        with contextlib.suppress(RuntimeError), single_keys() as keys:
            assert keys.are_on
            assert not termios.tcgetattr(slave)[3] & termios.ECHO
            os.write(master, b"cy")
            assert keys.read(1.0) == "cy"
            assert keys.read(0.0) == ""
            raise RuntimeError
        assert termios.tcgetattr(slave) == before
    os.close(master)


def test_without_a_terminal_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, encoding="utf-8") as stdin:  # noqa: PTH123 - os.devnull is a text
        monkeypatch.setattr("sys.stdin", stdin)
        with single_keys() as keys:
            assert (keys.are_on, keys.read(0.0)) == (False, "")

"""The node's report of a run whose folder is in a bucket."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.node import report_writer
from launch_train.node.report_writer import ReportWriter
from tests.train.report.folders import preempted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(Path(contract.__file__).parents[2]))
    return preempted(tmp_path)


def test_the_last_report_is_written_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # At the lowest priority, beside other tests, the process waits for a processor longer than a run's end allows.
    monkeypatch.setattr(report_writer, "LAST_SECONDS", 300.0)
    ReportWriter(str(folder)).close(300.0)
    assert (folder / runfolder.REPORT).stat().st_size > 60_000


def test_a_report_is_written_during_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_writer, "EVERY", 0.01)
    monkeypatch.setattr(ReportWriter, "_write", lambda self, _seconds: self._closed.set())
    writer = ReportWriter(str(folder))
    writer._thread.join(20.0)
    assert writer._closed.is_set()


def test_without_time_no_report_is_written(folder: Path) -> None:
    ReportWriter(str(folder)).close(0.5)
    assert not (folder / runfolder.REPORT).exists()


def test_a_report_that_takes_too_long_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(report_writer, "COMMAND", ("-c", "exec sleep 60"))
    ReportWriter(str(folder)).close(1.1)
    assert "not written in time" in capfd.readouterr().err

"""The process of the loggers may read slowly, never, or exit: training neither waits nor fails."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.telemetry import logger_process, metric_sink
from launch_train.telemetry.logger_process import LoggerProcess
from launch_train.telemetry.metric_sink import MetricsWriter, open_sink

COPY = """
import os, sys
open(os.environ["COPY"], "w").write(sys.stdin.readline() + sys.stdin.readline() + " ".join(sys.argv[1:]))
"""
NEVER = "import time; time.sleep(60)"
LINE = b'{"step": 1, "loss": 0.5}\n'


def running(code: str, **env: str) -> LoggerProcess:
    return LoggerProcess(["wandb", "mlflow"], env, [sys.executable, "-S", "-c", code])


def test_rows_and_the_end_reach_the_process(tmp_path: Path) -> None:
    one = running(COPY, COPY=str(tmp_path / "copy"))
    one.write(LINE, 1)
    one.finish(5.0, failed=True)
    one.finish(1.0, failed=False)  # only the first counts
    one.close()
    one.close()
    row, end, names = (tmp_path / "copy").read_text().splitlines()
    assert (json.loads(row)["step"], json.loads(end), names) == (1, [5.0, True], "wandb mlflow")


def test_a_process_that_never_reads_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_process, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(logger_process, "EXIT_SECONDS", 0.1)
    one, block, began = running(NEVER), LINE * 10_000, time.monotonic()
    for _ in range(10):
        one.write(block, 10_000)
    one.finish(0.0, failed=False)
    one.close()
    said = capsys.readouterr().err
    assert time.monotonic() - began < 5
    assert "not finished in time" in said
    assert "rows not logged" in said


def test_a_process_that_exits_costs_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    one = running("")
    one._process.wait()
    for _ in range(3):
        one.write(LINE, 1)
    one.finish(1.0, failed=False)
    one.close()
    one.write(LINE, 1)
    said = capsys.readouterr().err
    assert said.count("has exited") == 1
    assert "2 rows not logged" in said


def test_only_named_loggers_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Noted(LoggerProcess):
        def __init__(self, names: list[str], env: object) -> None:
            started.append(names)
            raise OSError("no memory")

    monkeypatch.setattr(metric_sink, "LoggerProcess", Noted)
    for names, board in (("tensorboard", True), ("wandb,mlflow", False), ("vertex,wandb", True), (None, True)):
        env = {contract.RUN_FOLDER: str(tmp_path), **({contract.LOGGERS: names} if names else {})}
        sink = open_sink(env)
        assert isinstance(sink, MetricsWriter)
        assert (sink._board is not None) is board
        sink.close()
    assert started == [["wandb", "mlflow"], ["wandb"]]
    assert not isinstance(open_sink({**env, "RANK": "1", contract.LOGGERS: "wandb"}), MetricsWriter)


def test_the_users_modules_do_not_hide_a_loggers_package() -> None:
    code = "import os, sys; sys.exit(os.environ.get('LAUNCH_CODE') is not None or os.environ['PYTHONSAFEPATH'] != '1')"
    one = running(code, **{contract.CODE: "/workspace"})
    assert one._process.wait() == 0
    one.close()

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.loggers import __main__ as process
from launch_train.loggers.feed import run_info
from tests.train.loggers.test_feed import Recorded

TRAINING: dict[str, Any] = {"event": "start", "config": {"steps": 2}}
STEP: dict[str, Any] = {"step": 1, "loss": 0.5}


@pytest.mark.parametrize(
    ("rows", "end", "state"),
    [
        ([TRAINING, STEP, {"event": "end"}], [5.0, False], "finished"),
        ([TRAINING, STEP], [5.0, False], "failed"),  # the trainer has an `end`
        ([TRAINING, STEP, {"event": "preempted", "step": 1}], [5.0, False], "preempted"),
        ([STEP], [5.0, False], "finished"),  # a script
        ([{"event": "start"}, STEP], [5.0, False], "finished"),
        ([STEP], [5.0, True], "failed"),
        ([STEP], None, "failed"),  # the training process was killed
    ],
)
def test_how_a_start_of_the_run_ends(
    rows: Sequence[Any], end: Any, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = {"wandb": Recorded(), "mlflow": Recorded()}
    monkeypatch.setattr(process, "_open_service", lambda name, env: services[name])
    process.main([*services], [json.dumps(line).encode() for line in (*rows, *([end] if end else ()))])
    assert {service.state for service in services.values()} == {state}
    assert [service.steps for service in services.values()] == [[1], [1]]


def test_a_line_that_a_killed_process_has_cut_off_does_not_cost_the_rows_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Recorded()
    monkeypatch.setattr(process, "_open_service", lambda name, env: service)
    process.main(["wandb"], [json.dumps(STEP).encode(), b'{"step": 2, "lo'])
    assert (service.steps, service.state) == ([1], "failed")


def test_a_run_has_its_id_and_its_spec_without_secrets(tmp_path: Path) -> None:
    plan = {"spec": {"name": "gpt", "env": {"A": "b"}, "run": {"config": {"steps": 1}, "args": ["--token", "abc"]}}}
    (tmp_path / runfolder.PLAN).write_text(json.dumps(plan))
    found = run_info({contract.RUN_FOLDER: str(tmp_path), contract.RUN: "gpt-1a2b3c4d"})
    assert found.id == "gpt-1a2b3c4d"
    assert found.spec == {"name": "gpt", "env": {"A": "•••"}, "run": {"args": ["--token", "•••"]}}


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"spec": 3}', '{"spec": {"run": 3}}'])
def test_an_unreadable_spec_does_not_stop_the_loggers(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / runfolder.PLAN).write_text(text)
    found = run_info({contract.RUN_FOLDER: str(tmp_path)})
    assert (found.id, found.spec) == (tmp_path.name, {})

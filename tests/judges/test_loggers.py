"""W&B's own file format and a real MLflow server judge what the loggers send.

The server runs in this process, over sqlite; W&B runs offline, in the real process of the loggers.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.loggers.feed import RunInfo
from launch_train.telemetry.metric_sink import open_sink
from launch_train.telemetry.rows import Row, plain_row

pytestmark = [
    pytest.mark.judges,
    pytest.mark.filterwarnings("ignore"),  # of the packages' own dependencies
]

RUN = "gpt-1a2b3c4d"
SPEC = {"name": "gpt", "machine": {"type": "h100"}, "env": {"KEY": "hidden"}, "run": {"config": {"steps": 6}}}
OWN = ("_step", "_runtime")
"""W&B's own values in each row."""
START = {"event": "start", "time": 1.0, "config": {"optimizer": {"lr": 0.1}, "steps": 6}}


def row(step: int, loss: float) -> Row:
    return {"step": step, "time": 1e9 + step, "loss": loss}


# --- W&B --------------------------------------------------------------------------------------------------------------


def records(file: Path) -> Iterator[Any]:
    """The records of a run's file: W&B's protobufs in the blocks of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    assert struct.unpack("<4sHB", data[:7]) == (b":W&B", 0xBEE1, 0)
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def found(file: Path) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """What a file has by step, and its other records."""
    history: dict[int, dict[str, Any]] = {}
    others = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            history[items["_step"]] = {name: value for name, value in items.items() if name not in OWN}
        else:
            others.append(record)
    return history, others


def test_wandb_has_the_rows_the_settings_and_one_id_for_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / runfolder.PLAN).write_text(json.dumps({"spec": SPEC}))
    ends: list[list[Row]] = [[{"event": "preempted", "step": 3, "time": 1.0}], [row(5, 0.1), {"event": "end"}]]
    for end in ends:
        sink = open_sink({contract.RUN_FOLDER: str(tmp_path), contract.RUN: RUN}, ["wandb"])
        evaluation: Row = {"event": "eval", "step": 3, "time": 1.0, "loss": 0.3}  # before the row of its step
        sink.put([START, row(1, 1.0), evaluation, row(2, math.nan), row(3, math.inf), *end])
        sink.close()
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN}/*.wandb"))
    (first, before), (second, after) = map(found, files)
    assert first[1] == {"train/loss": 1.0, "_timestamp": 1e9 + 1}
    assert math.isnan(first[2]["train/loss"])
    assert (first[3]["train/loss"], first[3]["eval/loss"]) == (math.inf, 0.3)
    assert (sorted(first), sorted(second)) == ([1, 2, 3], [1, 2, 3, 5])
    for others, code, preempting in ((before, 1, True), (after, 0, False)):
        kinds = [record.WhichOneof("record_type") for record in others]
        runs = [record.run for record in others if record.WhichOneof("record_type") == "run"]
        settings = {one.key: json.loads(one.value_json) for record in others for one in record.config.update}
        settings |= {one.key: json.loads(one.value_json) for run in runs for one in run.config.update}
        assert {(run.run_id, run.display_name, run.project, run.resume) for run in runs} == {(RUN, RUN, "gpt", True)}
        assert settings["optimizer"] == {"lr": 0.1}
        assert settings["spec"] == {"name": "gpt", "machine": {"type": "h100"}, "env": {"KEY": "•••"}, "run": {}}
        assert [record.exit.exit_code for record in others if record.HasField("exit")] == [code]
        assert ("preempting" in kinds) is preempting


# --- MLflow -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real MLflow server on loopback; its address."""
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.server import app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    yield address
    server.shutdown()
    thread.join()


def test_mlflow_has_one_run_that_each_start_continues(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    from launch_train.loggers.mlflow_run import MlflowRun

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "vision")
    run = RunInfo(RUN, "", os.environ, {"machine": {"type": "h100"}})
    client = MlflowClient()

    def started(rows: Sequence[Row], config: dict[str, Any], state: Any) -> Any:
        service = MlflowRun(run)
        service.configure(config)
        service.log([plain_row(one) for one in rows])
        service.finish(state)
        (found,) = client.search_runs([client.get_experiment_by_name("vision").experiment_id])
        return found

    first = started([row(1, 1.0), row(2, math.nan), row(3, -math.inf)], {"steps": 6, "a b": {"c(d)": 1}}, "preempted")
    assert (first.info.run_name, first.info.status) == (RUN, "KILLED")
    assert first.data.params == {"spec.machine.type": "h100", "steps": "6", "a b.c_d_": "1"}
    # Steps 2 and 3 are repeated after the resume; the evaluation of step 3 is new.
    evaluation: Row = {"event": "eval", "step": 3, "time": 1e9, "loss": 0.3}
    second = started([row(2, 9.0), row(3, 9.0), evaluation, row(4, 0.4)], {"steps": 8, "seed": 1}, "finished")
    assert (second.info.run_id, second.info.status) == (first.info.run_id, "FINISHED")
    assert (second.data.params["steps"], second.data.params["seed"]) == ("6", "1")  # MLflow never changes one
    points = client.get_metric_history(second.info.run_id, "train/loss")
    assert [(point.step, point.timestamp) for point in points] == [(n, int(1000 * (1e9 + n))) for n in (1, 2, 3, 4)]
    assert (points[0].value, points[3].value) == (1.0, 0.4)
    assert math.isnan(points[1].value)
    assert points[2].value == -1.7976931348623157e308  # MLflow's databases have no infinity
    assert [point.value for point in client.get_metric_history(second.info.run_id, "eval/loss")] == [0.3]

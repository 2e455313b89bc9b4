from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from train import contract, metrics, tensorboard
from train.errors import OutputError
from train.storage import LocalFolder
from train.tensorboard import scalars


def rows_of(folder: Path) -> list[dict[str, Any]]:
    storage = LocalFolder(folder)
    return [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]


def sink(folder: Path, **env: str) -> metrics.Sink:
    return metrics.open_sink({contract.RUN_FOLDER: str(folder), **env}, tensorboard=False)


def test_rows_come_out_in_order_and_complete(tmp_path: Path) -> None:
    out = sink(tmp_path)
    for block in range(100):
        out.put([{"step": 10 * block + i, "loss": 1 / (i + 1)} for i in range(10)])
    out.close()
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1000))


def test_parts_are_named_by_attempt_generation_and_node(tmp_path: Path) -> None:
    out = sink(tmp_path, LAUNCH_ATTEMPT="3", LAUNCH_GENERATION="2", LAUNCH_NODE="0")
    out.put([{"step": 1}])
    out.close()
    assert LocalFolder(tmp_path).list() == ["metrics/0003-0002-0000-000000.jsonl"]


def test_a_second_start_under_the_same_numbers_goes_on_behind_the_first(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        out = sink(tmp_path)
        out.put([{"step": step}])
        out.close()
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    assert len(LocalFolder(tmp_path).list("metrics/")) == 3


def test_rows_reach_the_folder_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.01)
    written, storage = threading.Event(), LocalFolder(tmp_path)

    class Watched(LocalFolder):
        def write(self, name: str, data: bytes, *, create: bool = False) -> None:
            super().write(name, data, create=create)
            written.set()

    out = metrics.Parts(Watched(tmp_path), metrics.part_names({}))
    out.put([{"step": 1}])
    assert written.wait(10)
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    out.put([{"step": 2}])
    out.close()
    assert len(storage.list("metrics/")) == 2


def test_only_rank_0_of_all_and_only_with_a_folder(tmp_path: Path) -> None:
    assert isinstance(metrics.open_sink({}), metrics.Null)
    assert isinstance(sink(tmp_path, RANK="1", LAUNCH_NODE="0"), metrics.Null)
    assert isinstance(sink(tmp_path, LAUNCH_NODE="1"), metrics.Null)
    for env in ({"RANK": "0", "LAUNCH_NODE": "0"}, {}):
        out = sink(tmp_path, **env)
        assert isinstance(out, metrics.Parts)
        out.close()


def test_a_row_is_strict_json() -> None:
    row = {"step": np.int64(3), "loss": torch.tensor(0.5), "lr": float("nan"), "x": float("-inf"), "ok": True}
    row |= {"p": Path("a"), "config": {"betas": (0.9, float("inf"))}}
    plain = metrics.plain(row)
    assert (plain["step"], plain["loss"], plain["ok"], plain["p"]) == (3, 0.5, True, "a")
    assert (plain["lr"], plain["x"], plain["nonfinite"]) == (None, None, ["lr", "x"])
    json.dumps(plain, allow_nan=False)


class Broken(LocalFolder):
    def write(self, name: str, data: bytes, *, create: bool = False) -> None:
        raise OutputError("the disk is full")


def test_a_folder_that_fails_stops_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(metrics, "QUEUE_BLOCKS", 2)
    out = metrics.Parts(Broken(tmp_path), metrics.part_names({}))

    def train_for_ever() -> None:
        while True:
            out.put([{"step": 1}])

    with pytest.raises(OutputError, match="disk is full"):
        train_for_ever()
    with pytest.raises(OutputError, match="disk is full"):
        out.close()
    out.close()


def test_an_error_of_the_last_write_is_raised_by_close(tmp_path: Path) -> None:
    out = metrics.Parts(Broken(tmp_path), metrics.part_names({}))
    out.put([{"step": 1}])
    with pytest.raises(OutputError, match="disk is full"):
        out.close()


def test_a_script_of_ones_own_needs_two_lines_and_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from train import metrics\n"
        "for step in range(1, 4): metrics.log(step, loss=1 / step)\n"
        "metrics.event('end', step=3)\n"
        "print('torch' in sys.modules)\n"
        "raise SystemExit(3)\n"
    )
    env = {"PATH": "", contract.RUN_FOLDER: str(tmp_path), "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "False\n"), done.stderr
    rows = rows_of(tmp_path)
    assert [row.get("step") for row in rows] == [1, 2, 3, 3]
    assert (rows[1]["loss"], rows[3]["event"]) == (0.5, "end")
    assert all(isinstance(row["time"], float) for row in rows)
    assert list((tmp_path / "logs").iterdir())


def test_without_a_folder_a_script_runs_as_if_nothing_was_there(tmp_path: Path) -> None:
    code = "from train import metrics; metrics.log(1, loss=2.0); print('done')"
    env = {"PATH": "", "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"done\n"
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_is_told_to_stop_writes_its_rows_first(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from train import metrics\n"
        "for step in range(1, 4): metrics.log(step, loss=1 / step)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    own = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('my own'))\n"
    env = {"PATH": "", contract.RUN_FOLDER: str(tmp_path), "PYTHONPATH": str(Path(metrics.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-15, "")
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    done = subprocess.run([sys.executable, "-c", own + code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "my own\n")


@pytest.mark.parametrize("step", [3, np.int64(3), np.float32(3), 3.0, torch.tensor(3)])
def test_a_step_is_a_whole_number(step: Any) -> None:
    assert metrics._whole(step) == 3
    assert type(metrics._whole(step)) is int


@pytest.mark.parametrize("step", ["3", 3.5, None, float("nan"), float("inf"), [3], torch.zeros(2), 1j])
def test_another_step_is_refused_at_once(step: Any) -> None:
    with pytest.raises(TypeError, match=r"metrics.log: the step must be a whole number, not "):
        metrics.log(step, loss=1.0)


def test_what_a_row_draws() -> None:
    assert scalars({"step": 3, "time": 1.0, "loss": 0.5, "lr": 1, "note": "x"}) == {"train/loss": 0.5, "train/lr": 1.0}
    assert scalars({"event": "eval", "step": 3, "loss": 0.5}) == {"eval/loss": 0.5}
    assert scalars({"event": "end", "step": 3, "loss": 0.5}) == {}
    assert scalars({"step": 3, "loss": None}) == {}


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard itself reads from a folder of events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {point.step: point.value for point in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    out = metrics.open_sink({contract.RUN_FOLDER: str(tmp_path)})
    out.put([{"step": step, "loss": 1 / step, "time": 1e9 + step} for step in range(1, 501)])
    out.put([{"event": "eval", "step": 500, "loss": 0.25}, {"event": "end", "step": 500}])
    out.close()
    drawn = curves(tmp_path / "logs")
    assert set(drawn) == {"train/loss", "eval/loss"}
    assert drawn["train/loss"] == pytest.approx({step: 1 / step for step in range(1, 501)})
    assert drawn["eval/loss"] == {500: 0.25}


def test_without_tensorboard_there_is_a_line_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    out = metrics.open_sink({contract.RUN_FOLDER: str(tmp_path)})
    out.put([{"step": 1}])
    out.close()
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    assert capsys.readouterr().err == "TensorBoard is not installed: no events are written\n"


def test_trouble_with_tensorboard_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Trouble:
        def add(self, rows: object) -> None:
            raise RuntimeError("no protobuf")

        def close(self) -> None:
            raise RuntimeError("no close either")

    board: Any = Trouble()
    out = metrics.Parts(LocalFolder(tmp_path), metrics.part_names({}), board)
    out.put([{"step": 1}])
    out.close()
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    assert capsys.readouterr().err == "no more TensorBoard events are written: no protobuf\n"


def test_a_board_that_can_not_be_opened_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("in the way")
    assert tensorboard.open_board(LocalFolder(tmp_path)) is None
    assert capsys.readouterr().err.startswith("no TensorBoard events are written: ")


def test_a_bucket_gets_whole_copies_of_the_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "COPY_SECONDS", 0.0)

    class Bucket:
        """A store that is not a local folder, as far as the board can tell."""

        def __init__(self) -> None:
            self.folder = LocalFolder(tmp_path / "bucket")
            self.url, self.write, self.read = "gs://b", self.folder.write, self.folder.read
            self.write_file, self.list, self.delete = self.folder.write_file, self.folder.list, self.folder.delete

    board = tensorboard.open_board(Bucket())
    assert board is not None
    board.add([{"step": 1, "loss": 0.5}])
    assert curves(tmp_path / "bucket" / "logs") == {"train/loss": {1: 0.5}}
    monkeypatch.setattr(tensorboard, "COPY_SECONDS", 1e6)
    board.add([{"step": 2, "loss": 0.25}])
    assert curves(tmp_path / "bucket" / "logs") == {"train/loss": {1: 0.5}}
    board.close()
    assert curves(tmp_path / "bucket" / "logs") == {"train/loss": {1: 0.5, 2: 0.25}}


def test_the_thread_is_told_only_what_it_was_given(tmp_path: Path) -> None:
    out, rows = sink(tmp_path), [{"step": 1}]
    given: Sequence[metrics.Row] = rows
    out.put(given)
    out.close()
    out.close()
    assert rows == [{"step": 1}]

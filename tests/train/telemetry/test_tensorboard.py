from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch_train import metrics
from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import GcsFolder, LocalFolder
from launch_train.telemetry import metric_sink, tensorboard
from launch_train.telemetry.rows import scalars
from launch_train.telemetry.tensorboard import Board, open_board
from launch_train.telemetry.upload_queue import Outbox, sweep_spools
from launcher.testing.googlecloud import GoogleCloud

Points = list[tuple[int, float]]


def by_accumulator(folder: Path) -> dict[str, Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def by_multiplexer(folder: Path) -> dict[str, Points]:
    """What TensorBoard's pages are made of, where its faster server isn't there."""
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.util.tensor_util import make_ndarray

    many = EventMultiplexer(tensor_size_guidance={"scalars": 0})
    many.AddRunsFromDirectory(str(folder.parent))
    many.Reload()
    run = many.GetAccumulator(folder.name)
    tags = run.Tags()["tensors"]
    return {tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in run.Tensors(tag)] for tag in tags}


READERS: list[Callable[[Path], dict[str, Points]]] = [by_accumulator, by_multiplexer]


@pytest.fixture(params=READERS, ids=lambda reader: reader.__name__)
def curves(request: pytest.FixtureRequest) -> Any:
    """What TensorBoard itself reads from a folder of events: all points of each curve, in the order shown."""
    return request.param


def board(storage: LocalFolder, outbox: Outbox | None = None, start: str = "0001-0000") -> Board:
    made = open_board(storage, outbox or Outbox(storage), start)
    assert made is not None
    return made


def rows(*steps: int, run: float = 0.0) -> list[dict[str, float]]:
    return [{"step": step, "loss": step + run, "time": 1e9 + step} for step in steps]


def test_what_a_row_draws() -> None:
    assert scalars({"step": 3, "time": 1.0, "loss": 0.5, "lr": 1, "note": "x"}) == {"train/loss": 0.5, "train/lr": 1.0}
    assert scalars({"event": "eval", "step": 3, "loss": 0.5}) == {"eval/loss": 0.5}
    assert scalars({"event": "end", "step": 3, "loss": 0.5}) == {}
    assert scalars({"step": 3, "loss": None}) == {}
    assert scalars({"step": 3, "loss": None, "nonfinite": {"loss": "inf"}}) == {"train/loss": float("inf")}
    assert scalars({"step": 3, "nonfinite": 2}) == {"train/nonfinite": 2.0}
    assert scalars({"step": 3, "nonfinite": "all"}) == {}


def test_tensorboard_reads_what_was_written(tmp_path: Path, curves: Any) -> None:
    out = metric_sink.open_sink({contract.RUN_FOLDER: str(tmp_path)})
    out.put([{"step": step, "loss": 1 / step, "time": 1e9 + step} for step in range(1, 501)])
    out.put([{"event": "eval", "step": 500, "loss": 0.25}, {"event": "end", "step": 500}])
    out.close()
    drawn = curves(tmp_path / "logs")
    assert set(drawn) == {"train/loss", "eval/loss"}
    assert [step for step, _ in drawn["train/loss"]] == list(range(1, 501))
    assert [value for _, value in drawn["train/loss"]] == pytest.approx([1 / step for step in range(1, 501)])
    assert drawn["eval/loss"] == [(500, 0.25)]


@pytest.mark.parametrize("size", [300, 1 << 20])
def test_a_resumed_run_draws_no_second_curve(
    tmp_path: Path, curves: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Steps 61 to 80 were done, and lost with their checkpoint: they are done again, by the third start too."""
    monkeypatch.setattr(tensorboard, "FILE_BYTES", size)
    for run, (start, steps) in enumerate(
        [("0001-0000", range(1, 81)), ("0001-0001", range(61, 71)), ("0002-0000", range(61, 101))]
    ):
        drawing = board(LocalFolder(tmp_path), start=start)
        drawing.add([{"event": "resumed", "step": 0}, *rows(*steps, run=run / 4)])
        drawing.close()
    drawn = curves(tmp_path / "logs")["train/loss"]
    assert drawn == [*((step, step) for step in range(1, 61)), *((step, step + 0.5) for step in range(61, 101))]


def test_two_scripts_that_know_no_attempt_lose_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, steps in ((1_700_000_000, (1, 2)), (1_700_000_100, (3, 4))):
        monkeypatch.setattr("launch_train.telemetry.tensorboard.time.time", lambda now=now: now)
        drawing = board(LocalFolder(tmp_path))
        drawing.add(rows(*steps))
        drawing.close()
    assert by_accumulator(tmp_path / "logs") == {"train/loss": [(1, 1), (2, 2), (3, 3), (4, 4)]}


def test_a_killed_start_leaves_its_events_in_its_spool_alone(
    tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sweeps the spool removes them with it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    for name in ("tmp", "spool"):
        (tmp_path / name).mkdir()
    code = (
        "import os, signal; from launch_train import metrics\n"
        "metrics.log(1, loss=1.0); metrics._default().flush(20); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {
        contract.RUN_FOLDER: "gs://my-bucket/r",
        contract.SPOOL: str(tmp_path / "spool"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": str(Path(metrics.__file__).parents[1]),
        "STORAGE_EMULATOR_HOST": cloud.url,
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert list((tmp_path / "spool").glob("launch-spool-*/launch-logs-*/events.*"))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sweep_spools(tmp_path / "spool", GcsFolder("gs://my-bucket/r"), 20) == 0
    assert list((tmp_path / "spool").iterdir()) == []


class Copies(Outbox):
    """An outbox that notes the sizes of the files that it gets."""

    def __init__(self, folder: Path) -> None:
        self.copies, self.sizes = LocalFolder(folder), list[int]()
        super().__init__(self.copies)

    def put_file(self, name: str, path: Path) -> None:
        self.sizes.append(path.stat().st_size)
        super().put_file(name, path)


class Bucket(LocalFolder):
    """As far as the board can tell: another kind of storage."""


def test_a_bucket_gets_whole_copies_of_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curves: Any
) -> None:
    monkeypatch.setattr(tensorboard, "LocalFolder", type("Never", (), {}))
    monkeypatch.setattr(tensorboard, "FILE_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copies = Copies(tmp_path / "bucket")
    drawing = board(Bucket(tmp_path / "unused"), copies)
    for step in range(1, 301):
        drawing.add(rows(step))
        if step % 20 == 0:
            assert curves(tmp_path / "bucket" / "logs")["train/loss"][-1] == (step, step)
        drawing.add([{"event": "checkpoint", "step": step}])
    assert len(list(tmp_path.glob("launch-logs-*/*"))) == 1, "a file that is full isn't kept here"
    drawing.close()
    assert curves(tmp_path / "bucket" / "logs") == {"train/loss": [(step, step) for step in range(1, 301)]}
    assert max(copies.sizes) < 1200
    assert 300 <= len(copies.sizes) < 350, "what holds nothing new isn't sent again"
    assert [path.name for path in tmp_path.iterdir()] == ["bucket"]


def test_the_curves_of_a_run_on_a_bucket(
    tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, curves: Any
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    out = metric_sink.open_sink({contract.RUN_FOLDER: "gs://my-bucket/r", contract.SPOOL: str(tmp_path / "spool")})
    out.put(rows(*range(1, 11)))
    assert out.flush(20)
    assert curves(downloaded(cloud, tmp_path / "1" / "logs"))["train/loss"] == [(step, step) for step in range(1, 11)]
    out.put(rows(*range(11, 21)))
    out.close()
    assert curves(downloaded(cloud, tmp_path / "2" / "logs"))["train/loss"] == [(step, step) for step in range(1, 21)]


def downloaded(cloud: GoogleCloud, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, blob in cloud.objects.buckets["my-bucket"].items():
        if name.startswith("r/logs/"):
            (folder / Path(name).name).write_bytes(blob.data)
    return folder


def test_without_tensorboard_there_is_a_line_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    out = metric_sink.open_sink({contract.RUN_FOLDER: str(tmp_path)})
    out.put([{"step": 1}])
    out.close()
    assert len(list((tmp_path / "metrics").iterdir())) == 1
    assert capsys.readouterr().err == "TensorBoard is not installed: no events are written\n"


def test_trouble_with_tensorboard_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Trouble:
        def add(self, rows: object) -> None:
            raise OutputError("no protobuf")

        def close(self) -> None:
            raise OutputError("no close either")

    trouble: Any = Trouble()
    storage = LocalFolder(tmp_path)
    out = metric_sink.MetricsWriter(storage, Outbox(storage), metric_sink.part_names({}), trouble)
    out.put([{"step": 1}])
    out.close()
    assert len(list((tmp_path / "metrics").iterdir())) == 1
    err = capsys.readouterr().err
    assert err.startswith("TensorBoard disabled")
    assert err.endswith(": no protobuf\n")

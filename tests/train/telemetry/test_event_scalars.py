"""Scalars that are read from TensorBoard's own event files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch_train.telemetry import event_files
from launch_train.telemetry.event_files import EventScalars, event_records


class Writer:
    """A file as torch.utils.tensorboard and TensorFlow write it, with TensorBoard's own record writer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.write(wall_time=1.0, file_version="brain.Event:2")

    def write(self, **values: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self.path.open("ab") as file:
            RecordWriter(file).write(Event(**values).SerializeToString())

    def scalar(self, step: int, tag: str, value: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.write(wall_time=2.5, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))

    def tensor(self, step: int, tag: str, **tensor: Any) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        summary = Summary(value=[Summary.Value(tag=tag, tensor=TensorProto(**tensor))])
        self.write(wall_time=2.5, step=step, summary=summary)


def read(reader: EventScalars) -> list[tuple[int, str, float]]:
    paths = sorted(reader.folder.rglob("*.tfevents.*"), key=lambda path: path.name)
    return [(scalar.step, scalar.name, scalar.value) for scalar in reader.read(paths)]


def test_new_scalars_are_read_once_and_from_where_the_file_had_ended(tmp_path: Path) -> None:
    reader = EventScalars(tmp_path / "runs", 0.0)
    assert read(reader) == []
    writer = Writer(tmp_path / "runs" / "a-run" / "events.out.tfevents.1.host.7.0")
    assert read(reader) == []
    writer.scalar(1, "train/loss", 0.5)
    writer.scalar(1, "charts/return", -3.0)
    assert read(reader) == [(1, "loss", 0.5), (1, "charts/return", -3.0)]
    writer.scalar(300, "train/loss", float("nan"))
    (scalar,) = reader.read([writer.path])
    assert (scalar.step, scalar.time) == (300, 2.5)
    assert np.isnan(scalar.value)
    assert read(reader) == []


def test_a_python_without_googles_packages_reads_them_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer(tmp_path / "events.out.tfevents.1.host.7.0").scalar(1, "loss", 0.5)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert read(EventScalars(tmp_path, 0.0)) == [(1, "loss", 0.5)]


def test_tensors_without_dimensions_are_scalars(tmp_path: Path) -> None:
    from tensorboard.compat.proto import types_pb2 as types
    from tensorboard.util.tensor_util import make_tensor_proto

    writer = Writer(tmp_path / "events.out.tfevents.1.host.7.0.v2")
    writer.tensor(1, "float", dtype=types.DT_FLOAT, float_val=[0.25])
    writer.tensor(1, "double", dtype=types.DT_DOUBLE, double_val=[-1e300])
    writer.tensor(1, "int", dtype=types.DT_INT32, int_val=[-5])
    writer.tensor(1, "long", dtype=types.DT_INT64, int64_val=[1 << 40])
    for name, value in {"f": np.float32(0.5), "d": np.float64(0), "i": np.int32(-7), "l": np.int64(-1 << 40)}.items():
        proto = make_tensor_proto(value)
        content = {"tensor_content": np.asarray(value).tobytes()}
        writer.tensor(2, f"content/{name}", dtype=proto.dtype, tensor_shape=proto.tensor_shape, **content)
    writer.write(step=3, summary={"value": [{"tag": "histogram", "tensor": make_tensor_proto(np.ones((2, 3)))}]})
    writer.write(step=3, summary={"value": [{"tag": "note", "tensor": make_tensor_proto("some text")}]})
    assert read(EventScalars(tmp_path, 0.0)) == [
        *((1, "float", 0.25), (1, "double", -1e300), (1, "int", -5.0), (1, "long", float(1 << 40))),
        *((2, "content/f", 0.5), (2, "content/d", 0.0), (2, "content/i", -7.0), (2, "content/l", -float(1 << 40))),
    ]


def test_a_tag_gets_its_folder_only_where_its_name_is_taken(tmp_path: Path) -> None:
    first, second = tmp_path / "runs" / "Nov24_20-00", tmp_path / "runs" / "Nov24_21-00"
    for start, folder in enumerate((first, second), start=1):
        tags = {"0": ("", "train/loss"), "1": ("loss_val", "loss"), "2": ("loss_val", "f1"), "3": ("", "step")}
        for number, (sub_folder, tag) in {**tags, "4": ("", "loss")}.items():
            Writer(folder / sub_folder / f"events.out.tfevents.{start}{number}.host").scalar(1, tag, float(number))
        reader = EventScalars(tmp_path / "runs", 0.0 if start == 1 else 1e9 + 5)
        names = ["loss", "loss_val/loss", "f1", f"{folder.name}/step", f"{folder.name}/loss"]
        assert [name for _, name, _ in read(reader)] == names
        for path in folder.rglob("events.*"):
            os.utime(path, (1e9, 1e9))


def test_a_value_at_step_0_counts_once_its_tag_has_a_later_step(tmp_path: Path) -> None:
    reader, writer = EventScalars(tmp_path, 0.0), Writer(tmp_path / "events.out.tfevents.1.host")
    writer.scalar(0, "parameters", 1e6)
    writer.scalar(0, "loss", 9.0)
    writer.scalar(-1, "loss", 9.5)
    assert read(reader) == []
    writer.scalar(100, "loss", 1.0)
    assert read(reader) == [(0, "loss", 9.0), (100, "loss", 1.0)]
    assert [scalar.value for scalar in reader.initial.values()] == [1e6]


def test_what_an_earlier_start_wrote_is_not_read_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "events.out.tfevents.1.host.7.0")
    writer.scalar(1, "loss", 1.0)
    os.utime(writer.path, (1e9, 1e9))
    reader = EventScalars(tmp_path, 1e9 + 5)
    assert read(reader) == []
    writer.scalar(2, "loss", 2.0)
    Writer(tmp_path / "events.out.tfevents.2.host.8.0").scalar(1, "loss", 9.0)
    assert read(reader) == [(2, "loss", 2.0), (1, "loss", 9.0)]


@pytest.fixture
def three(tmp_path: Path) -> tuple[bytearray, list[int]]:
    """The content of a file with three scalars, and where its records end."""
    writer = Writer(tmp_path / "complete" / "events.out.tfevents.1")
    for step in (1, 2, 3):
        writer.scalar(step, "loss", float(step))
    data = writer.path.read_bytes()
    return bytearray(data), [end for end, _ in event_records(data)]


def test_no_record_is_lost_wherever_a_read_ends(
    tmp_path: Path, three: tuple[bytearray, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, ends = three
    for cut in range(len(data)):  # the file ends there at the first read
        reader, path = EventScalars(tmp_path / str(cut), 0.0), tmp_path / str(cut) / "events.out.tfevents.1"
        path.parent.mkdir()
        path.write_bytes(data[:cut])
        scalars = read(reader)
        assert len(scalars) == sum(end <= cut for end in ends[1:])
        path.write_bytes(data)
        assert scalars + read(reader) == [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0)]
    for window in range(max(np.diff([0, *ends])), len(data)):  # the read ends within a record
        monkeypatch.setattr(event_files, "READ_BYTES", window)
        reader = EventScalars(path.parent, 0.0)
        scalars = read(reader)
        while reader.is_behind:
            scalars += read(reader)
        assert scalars == [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0)]


@pytest.mark.parametrize("place", [0, 8, 20])  # the length, its checksum, the data
def test_a_damaged_file_is_reported_once_and_read_no_further(
    place: int, tmp_path: Path, three: tuple[bytearray, list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    data, ends = three
    data[ends[1] + place] ^= 255
    path = tmp_path / "damaged" / "events.out.tfevents.1"
    path.parent.mkdir()
    path.write_bytes(data)
    reader = EventScalars(path.parent, 0.0)
    assert read(reader) + read(reader) == [(1, "loss", 1.0)]
    assert capfd.readouterr().err.count("a record's checksum is wrong") == 1
    Writer(path.with_name("events.out.tfevents.2")).scalar(5, "loss", 5.0)
    assert read(reader) == [(5, "loss", 5.0)]


def test_a_record_larger_than_a_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "READ_BYTES", 1 << 10)
    writer = Writer(tmp_path / "events.out.tfevents.1")
    writer.scalar(1, "loss", 1.0)
    writer.tensor(1, "image", dtype=1, tensor_content=bytes(1 << 14))
    image = writer.path.read_bytes()
    writer.scalar(2, "loss", 2.0)
    complete = writer.path.read_bytes()
    reader = EventScalars(tmp_path, 0.0)
    writer.path.write_bytes(image[:-100])
    assert read(reader) == [(1, "loss", 1.0)]
    writer.path.write_bytes(complete)
    assert read(reader) == [(2, "loss", 2.0)]

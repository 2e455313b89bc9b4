"""What a report reads of a run folder, damaged or not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder
from launch_train.report import page
from launch_train.runfolder import starts
from launch_train.runfolder.starts import Columns, parse_metrics
from tests.train.report.folders import T, preempted, read, rows, write


def test_the_newest_start_that_ran_a_step_counts(tmp_path: Path) -> None:
    run = read(preempted(tmp_path))
    found = run.series()
    assert [*found.steps] == [*range(1, 51)]
    assert found.times[24] == T + 185  # the last step that counts of the first start
    assert found.times[25] > T + 400
    assert [(start.key, count) for start, count in run.kept()] == [((1, 0), 25), ((2, 0), 25)]


def test_it_reads_as_launch_metrics_does(tmp_path: Path) -> None:
    folder = preempted(tmp_path)
    parts = {f"metrics/{path.name}": path.read_bytes() for path in (folder / "metrics").iterdir()}
    theirs = {row["step"]: row["loss"] for row in parse_metrics(parts).rows}
    ours = read(folder).series()
    assert dict(zip(ours.steps, ours.values["loss"], strict=True)) == theirs


def test_a_damaged_folder_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    good = rows([3, 1, 2, 2], T)
    text = [
        '{"step": 4, "loss": 1',
        "[1, 2]",
        '"text"',
        {"step": "5", "loss": 1.0},
        {"step": True, "loss": 1.0},
        {"loss": 2.0},
        {"step": 6, "loss": "nan", "nonfinite": ["loss"], "time": None},
        {"step": 7, "loss": None, "extra": 1, "time": float("inf")},
    ]
    names = {
        "metrics/0001-0000-0000-000000.jsonl": [*good, *text],
        "metrics/odd.jsonl": [{"step": 99, "loss": 1.0}],
        "attempts/0001.json": ["{"],
        "plan.json": ["[]"],
        "monitor/0001-0000-0000-000000.jsonl": [{"gpus": [], "time": 1e9}, {"gpus": []}, {"time": "x"}],
    }
    run = read(write(tmp_path / "run-1", names))
    series = run.series()
    assert [*series.steps] == [1, 2, 3, 6, 7]
    assert math.isnan(series.values["loss"][3])
    assert math.isnan(series.values["loss"][4])
    assert series.values["extra"][4] == 1
    assert run.id == "run-1"
    assert [*map(len, run.monitor.values())] == [1]


def test_an_empty_folder(tmp_path: Path) -> None:
    run = read(tmp_path)
    assert (run.starts, run.attempts, [*run.series().steps]) == ((), (), [])


def lines(*records: object) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


@pytest.mark.parametrize(
    "part",
    [
        lines(*({"step": step, "loss": 2 / step, "val/loss": 3, "class": 1e-9, "time": T} for step in (1, 2, 3))),
        lines({"step": 1, "loss": 1.0, "time": T}, {"step": 2, "loss": 1.0, "acc": 0.5, "time": T}),
        lines(
            {"step": 2, "loss": 1.0, "time": T}, {"step": 1, "loss": 3, "time": T}, {"step": 2, "loss": 2, "time": T}
        ),
        lines({"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}),
        lines({"step": 1, "loss": 1.0, "time": T}, {"step": 2, "loss": True, "time": T}),
        lines({"step": 1.0, "loss": 1.0, "time": T}, {"step": 2, "loss": "1", "time": T}),
        lines({"step": 1, "loss": 1.0, "time": T}, {"step": 2**70, "loss": 2.0, "time": T}),
        lines({"step": 1, "loss": 1.0, "time": T}, {"step": 2, "loss": math.inf, "time": T}),
        lines({"step": 1, "loss": math.nan, "nonfinite": ["loss"], "time": T}),
        lines({"step": 1, "loss": 1.0, "nonfinite": 3, "time": T}),
        lines({"step": 1, "event": 5, "time": T}),
        lines({"event": "start", "time": T}, {"step": 1, "loss": 1.0, "time": T}),
        lines({"step": 1, "loss": 1.0, "time": T}, {"event": "end", "time": T}, {"step": 2, "loss": 1.0, "time": T}),
        lines({"step": 1, "\ud800": 1.0, "time": T}),
        lines([1, 2], "step", 3, {}) + b'{"step": 1, "lo',
        lines({"step": 1, "loss": 1.0, "time": T}) + b'{"step": 2, "lo\n\xff\n',
        b"",
    ],
)
def test_rows_are_read_alike_with_and_without_msgspec(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_part() -> object:
        start = starts.Start((1, 0))
        start.add(part)
        start.close()
        return repr((start.rows.steps, start.rows.times, sorted(start.rows.values.items()), start.events))

    fast = read_part()
    monkeypatch.setattr(starts, "_alike", lambda _text: None)
    assert fast == read_part()
    monkeypatch.setattr(starts, "_uniform_columns", lambda rows: rows[10**9])
    assert fast == read_part()


def test_a_later_row_of_a_step_replaces_the_earlier() -> None:
    columns = Columns()
    for row in ({"step": 1, "a": 1.0}, {"step": 1, "a": 2.0, "b": 3.0}, {"step": 2, "b": 4.0}):
        columns.add(row)
    columns.close()
    assert [*columns.steps] == [1, 2]
    assert columns.values["a"][0] == 2.0
    assert math.isnan(columns.values["a"][1])
    assert [*columns.values["b"]] == [3.0, 4.0]


def test_an_unreadable_part_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "metrics/0002-0000-0000-000000.jsonl"
    real = LocalFolder.read

    def read_or_fail(folder: LocalFolder, name: str) -> bytes:
        if name == broken:
            raise OutputError("no permission")
        return real(folder, name)

    monkeypatch.setattr(LocalFolder, "read", read_or_fail)
    run = read(preempted(tmp_path))
    assert [*run.series().steps] == [*range(1, 31)]
    assert run.problems == (f"{broken}: no permission",)
    assert broken in page([run])

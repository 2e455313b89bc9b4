"""The comparison of a sweep's points: its axes, the best point, and pages of many points."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launch_train.report import page
from launch_train.report.sweep import Axis, sweep_of
from launch_train.runfolder.run import RunData
from tests.train.report.folders import T, read, rows, write
from tests.train.report.test_page import EVIL, Reader, data_of


def point(folder: Path, number: int, *, held_out: float | None = None, sweep: str = "s-012345", **more: Any) -> RunData:
    """A point of a sweep: `lr` and other settings, and its metrics."""
    config = {"lr": 10.0**-number, "steps": 2, **more}
    spec = {"name": "run", "labels": {"launch-sweep": sweep}, "run": {"config": config}}
    metrics: list[dict[str, Any]] = [{"event": "start", "time": T}, *rows([1, 2], T, scale=number)]
    metrics[-1]["loss"] = float(number)
    if held_out is not None:
        metrics.append({"event": "eval", "step": 2, "loss": held_out, "time": T + 3})
    plan = {"run": f"run-{number:08x}", "spec": spec}
    return read(write(folder / str(number), {"plan.json": plan, "metrics/0001-0000-0000-000000.jsonl": metrics}))


def compared(runs: list[RunData]) -> Any:
    from launch_train.report.settings import flat_settings

    return sweep_of(runs, [flat_settings(run) for run in runs])


def test_the_best_point_has_the_lowest_held_out_loss(tmp_path: Path) -> None:
    runs = [point(tmp_path, number, held_out=loss) for number, loss in ((1, 3.0), (2, 1.5), (3, 2.0))]
    found = compared(runs)
    assert found.settings == ("run.config.lr",)
    assert [one.run for one in found.points] == ["run-00000002", "run-00000003", "run-00000001"]
    text = page(runs)
    assert "<title>s-012345</title>" in text
    assert "Best point: <strong>run-00000002</strong> with run.config.lr 0.01: lowest held-out loss 1.5000" in text
    lines = [attrs for tag, attrs in Reader(text).tags if tag == "polyline" and "point" in str(attrs.get("class"))]
    assert [one["class"] for one in lines].count("point best") == 1
    assert lines[-1]["class"] == "point best", "on top of the others"


def test_without_evaluations_the_training_loss_counts(tmp_path: Path) -> None:
    found = compared([point(tmp_path, number) for number in (3, 1, 2)])
    assert [one.run for one in found.points] == ["run-00000001", "run-00000002", "run-00000003"]
    assert "last 10 rows" in found.measure


def test_a_point_without_a_result_is_last_and_has_a_line(tmp_path: Path) -> None:
    plan = {"run": "run-none", "spec": {"labels": {"launch-sweep": "s-012345"}, "run": {"config": {"lr": 1.0}}}}
    none = read(write(tmp_path / "none", {"plan.json": plan, "attempts/0001.json": {"time": T}}))
    runs = [none, point(tmp_path, 1, held_out=2.0), point(tmp_path, 2, held_out=float("nan"))]
    found = compared(runs)
    assert [one.result for one in found.points] == [2.0, None, None]
    assert page(runs).count('class="point') == 3


def test_only_the_arguments_that_differ_are_compared(tmp_path: Path) -> None:
    runs = []
    for number, lr in enumerate(("1e-2", "1e-3"), 1):
        arguments = ["data", "--epochs", 3, f"--lr={lr}", "--amp"]
        spec = {"labels": {"launch-sweep": "s-012345"}, "run": {"script": "train.py", "args": arguments}}
        plan = {"run": f"run-{number:08x}", "spec": spec}
        runs.append(read(write(tmp_path / lr, {"plan.json": plan, "attempts/0001.json": {"time": T}})))
    found = compared(runs)
    assert found.settings == ("run.args.lr",)
    assert [point.settings for point in found.points] == [("1e-2",), ("1e-3",)]


@pytest.mark.parametrize("other", ["", "t-012345"])
def test_other_runs_are_no_sweep(tmp_path: Path, other: str) -> None:
    runs = [point(tmp_path, 1), point(tmp_path, 2, sweep=other)]
    assert compared(runs) is None
    assert "Sweep:" not in page(runs)
    assert compared(runs[:1]) is None


def test_axes() -> None:
    log = Axis("lr", ["1e-05", "0.001", "0.1"])
    assert log.is_log
    assert [log.place(one) for one in ("1e-05", "0.001", "0.1")] == pytest.approx([1, 0.5, 0])
    linear = Axis("size", ["16", "24", "32"])
    assert [linear.place(one) for one in ("16", "24", "32")] == [1, 0.5, 0]
    assert [Axis("zero", ["-1", "0", "1"]).place(one) for one in ("-1", "0")] == [1, 0.5]
    texts = Axis("model", ["b", "a", "", "b"])
    assert [text for _, text in linear.ticks()] == ["32", "24", "16"]
    assert [text for _, text in Axis("many", ["0", "1", "50", "51", "100"]).ticks()] == ["100", "51", "0"]
    assert [texts.place(one) for one in ("", "a", "b")] == [0, 0.5, 1]
    assert [text for _, text in texts.ticks()] == ["not set", "a", "b"]
    assert Axis("same", ["5", "5"]).place("5") == 0.5
    assert Axis("gap", ["5", ""]).place("") is None


def test_texts_of_the_settings_are_text_and_secrets_stay_hidden(tmp_path: Path) -> None:
    runs = [point(tmp_path, 1, kind=EVIL, hub_token="canary-one"), point(tmp_path, 2, kind="b", hub_token="canary-two")]
    text = page(runs)
    assert "canary" not in text
    assert [tag for tag, _ in Reader(text).tags].count("script") == 3
    assert not [attrs for _, attrs in Reader(text).tags if "style" in attrs]


def test_a_hundred_points_share_the_points_of_the_curves(tmp_path: Path) -> None:
    def long(number: int) -> RunData:
        run = point(tmp_path, number)
        run.starts[0].rows.steps.extend(range(3, 5003))
        run.starts[0].rows.times.extend([T] * 5000)
        for column in run.starts[0].rows.values.values():
            column.extend([float(number)] * 5000)
        return run

    text = page([long(number) for number in range(1, 101)])
    curves = data_of(text)["charts"][0]["curves"]
    assert len(curves) == 100
    assert sum(len(curve["y"]) for curve in curves) < 20_000
    assert "Timeline" not in re.sub(r"<script.*", "", text)
    assert len(text) < 3_000_000

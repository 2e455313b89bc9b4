"""`launch compare`: runs on this machine, and one in a bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train.common.storage import open_storage
from tests.cli.cloudjobs import Job
from tests.command import launch
from tests.train.report.folders import T, preempted, rows, write


def other(folder: Path) -> Path:
    """A run of 40 steps with another learning rate and image, at twice the speed; its newest losses are not finite."""
    plan: dict[str, Any] = json.loads((preempted(folder) / "plan.json").read_text())
    plan |= {"run": "run-4567cdef", "image": {"uri": "h/train:22", "dependencies": "h/deps:1", "files": 2, "size": 9}}
    plan["spec"]["run"] = {"args": ["--lr", "0.2"], "config": {"data": "gs://a-bucket/" + "very-long/" * 12}}
    plan["attempts"][0]["request"] = {"labels": {"launch-version": "0-2-0"}}
    for path in folder.glob("*/000*"):
        path.unlink()
    steps = rows(range(1, 41), T, tokens_per_s=2000.0, accuracy=0.5)
    steps[-1] |= {"loss": None, "nonfinite": {"loss": "nan"}, "accuracy": 0.75}
    records = [{"event": "start", "config": {"steps": 50}, "time": T}, *steps]
    return write(folder, {"plan.json": plan, "metrics/0001-0000-0000-000000.jsonl": records})


@pytest.fixture
def here(tmp_path: Path) -> Path:
    preempted(tmp_path / "runs" / "run-0123abcd")
    other(tmp_path / "runs" / "run-4567cdef")
    return tmp_path


def test_figures_and_differences_as_data(here: Path) -> None:
    found = json.loads(launch("compare", "run-0123abcd", "runs/run-4567cdef", "-o", "json", cwd=here).out)
    assert [(one["run"], one["state"], one["step"]) for one in found["runs"]] == [
        ("run-0123abcd", "finished", 50),
        ("run-4567cdef", "interrupted", 40),
    ]
    different = {one["name"]: one["values"] for one in found["differences"]}
    assert different["image"] == ["", "h/train:22"]
    assert different["image: code"] == ["", "2 files, 9 bytes"]
    assert different["launch"] == ["", "0.2.0"]
    assert different["run.args.lr"] == ["0.1", "0.2"]
    assert "machine" not in different
    assert "canary" not in json.dumps(found)
    figures = {(one["name"], one["kind"]): one for one in found["figures"]}
    final = sum(5 / step for step in range(41, 51)) / 10
    assert figures["loss", "final"]["values"] == [pytest.approx(final), None]
    assert figures["loss", "at_step"]["step"] == 39  # the newest that both have
    assert figures["loss", "at_step"]["deltas"] == [0, pytest.approx(0)]
    assert figures["loss", "best"]["values"][1] == pytest.approx(sum(5 / step for step in range(30, 40)) / 10)
    assert figures["held-out loss", "final"]["values"] == [0.2, None]
    assert ("held-out loss", "at_step") not in figures
    assert figures["accuracy", "best"]["values"] == [None, 0.75]  # of an accuracy the highest
    assert figures["tokens/s", None]["values"] == [None, 2000]
    assert figures["goodput", None]["values"][0] == pytest.approx(55 / 210)
    assert figures["cost", None]["values"][0] == pytest.approx(0.21)
    assert figures["time", None]["deltas"][0] == 0


def test_a_page_of_80_columns(here: Path) -> None:
    for number in range(3):
        other(here / "runs" / f"run-0000000{number}")
    names = [path.name for path in sorted((here / "runs").iterdir())]
    ran = launch("compare", *(f"runs/{name}" for name in names), cwd=here)
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert [line.split()[0] for line in ran.out.splitlines()[:5]] == [*"ABCDE"]
    print(ran.out)
    assert any(line.split()[:2] == ["run.args.lr", "0.2"] for line in ran.out.splitlines())
    assert "26.2%" in ran.out
    assert "loss: mean of the last 10 rows up to each step; other metrics are as logged" in ran.out
    assert "time, goodput and cost: of all attempts of a run" in ran.out


def test_runs_without_metrics(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(
            tmp_path / name, {"plan.json": {"run": name, "spec": {"labels": {"x": "\x1b[31m"}} if name == "a" else {}}}
        )
    ran = launch("compare", "a", "b", cwd=tmp_path)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "No run has written metrics yet." in ran.out
    assert "are the same" in launch("compare", "b", "b", cwd=tmp_path).out
    assert launch("compare", "a", cwd=tmp_path).code == 2


def test_values_are_written_as_in_the_spec(tmp_path: Path) -> None:
    for name, value in (("a", False), ("b", True)):
        plan = {"run": name, "spec": {"run": {"config": {"compile": value, "betas": [None, 0.9, value]}}}}
        write(tmp_path / name, {"plan.json": plan})
    shown = {
        line.split()[0]: line.split()[1:] for line in launch("compare", "a", "b", cwd=tmp_path).out.splitlines() if line
    }
    assert shown["run.config.compile"] == ["false", "true"]
    assert shown["run.config.betas"] == ["null", "0.9", "false", "null", "0.9", "true"]


def test_a_job_on_vertex_and_a_local_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    row = b'{"step": 1, "loss": 2.5, "time": 1750000000.0}\n'
    open_storage(f"gs://my-bucket/runs/{run}").write("metrics/0001-0000-0000-000000.jsonl", row)
    preempted(job.folder / "runs" / "run-0123abcd")
    figures = job.data("compare", run, "run-0123abcd")["figures"]
    assert next(one["values"] for one in figures if one["kind"] == "at_step") == [2.5, 5.0]

"""Run folders that somebody else wrote: whatever they hold, a reader answers, and obeys the person who reads alone."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.checkpointing.manifest import Manifest, manifest_json
from launch_train.checkpointing.multipart_writer import CheckpointPart
from launch_train.common.storage import open_storage
from tests.cli.flows.test_local_runs import NO_CLOUD, ended, make
from tests.command import ROOT, WORLD, launch


def process(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `launch` as a process of its own, which must answer soon."""
    env = {**WORLD, **NO_CLOUD, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "launcher", *map(str, argv)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=30, check=False)


def strict(text: str) -> Any:
    """Parse JSON; NaN and Infinity, which are no JSON, are an error."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", ["900000.json", "99999999999999999.json", "²²²².json", "0001.json.json"])
@pytest.mark.parametrize("command", ["status", "follow"])
def test_attempts_are_those_that_exist_whatever_the_highest_number(tmp_path: Path, command: str, name: str) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    (folder / runfolder.ATTEMPTS / name).write_text("{}")
    ran = process(command, "tiny-0123abcd", cwd=tmp_path)
    assert ran.returncode in (0, 3), ran.stderr
    assert "Traceback" not in ran.stderr
    if command == "status":
        is_number = name[:-5].isascii() and name[:-5].isdigit()
        assert ran.stdout.count(f"attempts/{name}: ") == is_number
        data = strict(process("status", "tiny-0123abcd", "-o", "json", cwd=tmp_path).stdout)
        assert [each["number"] for each in data["attempts"]] == [1, *([int(name[:-5])] if is_number else [])]


@pytest.mark.parametrize("command", ["status", "metrics", "compare", "export", "logs"])
def test_no_escape_sequence_of_a_run_folder_reaches_the_terminal(tmp_path: Path, command: str) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp"
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(1), rows=({"step": 1, "loss": 1.0, evil: 2.0},))
    storage = open_storage(str(folder))
    storage.write(runfolder.PLAN, json.dumps({"run": evil, "spec": {"labels": {evil: evil}}}).encode())
    storage.write(runfolder.text_part(1, 0, 0), f"{evil}\nRuntimeError: {evil}\n".encode())
    storage.write(runfolder.metrics_part(1, 0, 0, 1), json.dumps({"event": "eval", "step": 1, "loss": evil}).encode())
    manifest = Manifest(1, "0001-0000", ((CheckpointPart(evil, 1, evil),),), {"config": {"loss": evil}})
    storage.write(runfolder.manifest(1, "0001-0000"), manifest_json(manifest))
    more: list[str] = {"compare": [str(folder)], "export": ["--format", "torch"]}.get(command, [])
    ran = process(command, folder, *more, cwd=tmp_path)
    assert "Traceback" not in ran.stderr
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", ran.stdout + ran.stderr)
    if command in ("status", "metrics", "compare"):
        assert strict(process(command, folder, *more, "-o", "json", cwd=tmp_path).stdout)


def test_colours_and_a_progress_bars_earlier_states_are_left_out_of_a_log(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(1))
    log = b"\x1b[34m\x1b[1mtrain: \x1b[0mweights=\n\r  0%|    | 0/9\r 50%|##  | 4/9\r100%|####| 9/9\nend\n"
    open_storage(str(folder)).write(runfolder.text_part(1, 0, 0), log)
    shown = process("logs", folder, cwd=tmp_path).stdout
    assert "train: weights=\n" in shown
    assert "100%|####| 9/9\n" in shown
    assert "50%" not in shown
    assert "\\u00" not in shown


@pytest.mark.parametrize("plan", [{"attempts": 3}, {"attempts": ["x"]}, {"machine": "x"}, {"spec": 3}])
@pytest.mark.parametrize("command", ["status", "compare", "report"])
def test_a_plan_of_another_shape_is_no_traceback(tmp_path: Path, command: str, plan: dict[str, Any]) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(1))
    (folder / runfolder.PLAN).write_text(json.dumps(plan))
    (folder / runfolder.attempt_end(1)).write_text('{"exit_codes": {"a": [1], "b": 1}}')
    ran = launch(command, folder, *([folder] if command == "compare" else []), cwd=tmp_path, env=NO_CLOUD)
    assert ran.code == 0, ran.shown


ODD_ROW = b'{"step": 4, "loss": NaN, "lr": -Infinity, "huge": 1e999, "deep": {"worst": Infinity}, "list": [NaN, 1.0]}\n'


@pytest.mark.parametrize("command", [["status"], ["metrics"], ["runs", "--local"], ["compare"]])
def test_json_is_strict_whatever_the_rows_hold(tmp_path: Path, command: list[str]) -> None:
    runs = [make(tmp_path / "runs" / f"{name}-0123abcd", ended(0)) for name in ("a", "b")]
    for folder in runs:
        (folder / runfolder.metrics_part(1, 0, 0, 1)).write_bytes(ODD_ROW)
        (folder / runfolder.METRICS / "0001-0000-0000-000002.jsonl").write_bytes(b'{"event": "end", "mfu": NaN}\n')
    names = {"runs": (), "compare": tuple(runs)}.get(command[0], (runs[0],))
    ran = launch(*command, *names, "-o", "json", cwd=tmp_path, env=NO_CLOUD)
    assert ran.code == 0, ran.shown
    data = strict(ran.out)
    if command == ["metrics"]:
        row = data["rows"][-1]
        assert (row["loss"], row["lr"], row["huge"]) == (None, None, None)
        assert row["nonfinite"] == {"loss": "nan", "lr": "-inf", "huge": "inf"}
        assert row["deep"] == {"worst": None, "nonfinite": {"worst": "inf"}}
        assert row["list"] == [None, 1.0]
        assert data["nonfinite"]["loss"] == {"first_step": 4, "steps": 1}
    elif command != ["compare"]:
        progress = data["progress"] if command == ["status"] else data["runs"][0]["progress"]
        assert (progress["step"], progress["loss"], progress["nonfinite"]) == (4, None, {"loss": "nan"})


def test_the_report_has_the_values_that_are_no_numbers_as_gaps(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    (folder / runfolder.metrics_part(1, 0, 0, 1)).write_bytes(ODD_ROW)
    ran = launch("report", folder, "--output", "page.html", cwd=tmp_path, env=NO_CLOUD)
    assert ran.code == 0, ran.shown
    page = (tmp_path / "page.html").read_text()
    assert strict(page.partition("id=data>")[2].partition("</script>")[0])
    assert not math.isnan(len(page))

"""What launch wrote beside the code, and other specs there, change no run: neither its image nor its ID."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch_train import runfolder
from tests.command import launch

SPEC = "name: x\nmachine: {type: l4}\nregions: [us-central1]\nrun: {script: t.py, args: [%s]}\n"
PAGE = f'<!doctype html><html lang=en><head><meta charset="utf-8">{runfolder.PAGE_MARK}'
OUTPUTS = {
    "other.yaml": SPEC % "--lr, 2",
    "sweeps/page.html": PAGE,
    "out/config.json": '{\n  "run_folder": "runs/x-1",\n  "step": 3\n}',
    "out/model.safetensors": "weights",
    "run.log": "[workerpool0-0] step 1",
    "nohup.out": "[workerpool0-0] step 1",
}


def planned(folder: Path) -> tuple[str, str, int]:
    plan = json.loads(launch("vertex", folder / "job.yaml", "--dry-run", "-o", "json").out)
    return plan["run"], plan["image"]["uri"], plan["image"]["files"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(SPEC % "--lr, 1")
    (tmp_path / "t.py").write_text("print(1)\n")
    return tmp_path


def write(folder: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_other_specs_logs_pages_and_exports_change_no_run(folder: Path) -> None:
    before = planned(folder)
    write(folder, OUTPUTS)
    assert planned(folder) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "machine: {type: robot}\njoints: 6\n"),  # no spec of launch
        ("page.html", "<!doctype html><html>"),
        ("out/config.json", '{"hidden_size": 4}'),
    ],
)
def test_files_that_only_look_alike_are_code(folder: Path, name: str, text: str) -> None:
    _, _, files = planned(folder)
    write(folder, {name: text})
    assert planned(folder)[2] == files + 1


@pytest.mark.parametrize(("name", "files"), [("other.yaml", 1), ("page.html", 1), ("out", 2), ("run.log", 1)])
@pytest.mark.parametrize("by_code", [True, False])
def test_what_an_argument_or_the_code_names_is_code(folder: Path, name: str, files: int, by_code: bool) -> None:
    if by_code:
        (folder / "t.py").write_text(f"print({name!r})\n")
    else:
        (folder / "job.yaml").write_text(SPEC % f"--with, {name}")
    before = planned(folder)[2]
    write(folder, OUTPUTS)
    assert planned(folder)[2] == before + files

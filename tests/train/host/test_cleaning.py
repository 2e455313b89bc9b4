"""`launch on HOST --clean` on the host: what is needed stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch_train.host import machine
from launch_train.host.cleaning import remove_unneeded

AddJob = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("code/of-gone", "code/young", "trainer/own", "trainer/old", "venvs/unused", "work/leftover"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x" * 1000)
    return tmp_path


@pytest.fixture
def add_job(root: Path) -> AddJob:
    def add(name: str, folder: str, venv: str = "") -> Path:
        job = {"id": name, "run": f"run-{name}", "folder": folder, "code": f"of-{name}", "trainer": f"of-{name}"}
        place = root / "jobs" / name
        place.mkdir(parents=True)
        (place / "lock").touch()
        (place / "job.json").write_text(json.dumps(job | {"python": str(root / "venvs" / venv / "bin" / "python")}))
        for kind in ("code", "trainer"):
            (root / kind / f"of-{name}").mkdir(exist_ok=True)
        for path in (root / "work" / name, root / "runs-locked" / f"run-{name}"):
            path.mkdir(parents=True)
        return place

    return add


def removed_from(root: Path, *, dry_run: bool = False) -> set[str]:
    """Remove what is not needed from a host on which all but code/young is old."""
    for path in root.glob("*/*"):
        if path.name != "young":
            os.utime(path, (0, 0), follow_symlinks=False)
    before = {path.relative_to(root).as_posix() for path in root.glob("*/*") if path.suffix != ".lock"}
    removed = {item["path"] for item in remove_unneeded(root, "own", dry_run=dry_run)}
    after = {path.relative_to(root).as_posix() for path in root.glob("*/*") if path.suffix != ".lock"}
    assert after == before - (set() if dry_run else removed)
    return removed


UNUSED = {"code/of-gone", "trainer/old", "venvs/unused", "work/leftover"}


def test_what_nothing_needs_is_removed_with_its_size(root: Path) -> None:
    assert removed_from(root, dry_run=True) == UNUSED
    (root / "venvs" / "unused.log").touch()
    items = {item["path"]: item["bytes"] for item in remove_unneeded(root, "own", dry_run=False)}
    assert items == dict.fromkeys(UNUSED, 1000)
    assert not (root / "venvs" / "unused.log").exists()
    assert removed_from(root) == set()


def test_a_job_whose_run_folder_is_gone_goes_with_all_that_it_used(root: Path, add_job: AddJob) -> None:
    add_job("gone", str(root / "runs" / "gone"))
    (root / "venvs" / "unused.lock").touch()
    of_job = {"jobs/gone", "code/of-gone", "trainer/of-gone", "work/gone", "runs-locked/run-gone"}
    assert removed_from(root) == UNUSED | of_job


def test_a_running_job_keeps_all(root: Path, add_job: AddJob) -> None:
    lock = machine.lock_file(add_job("running", str(root / "runs" / "gone")) / "lock", "")
    assert lock is not None
    assert removed_from(root) == UNUSED
    os.close(lock)


def test_a_job_in_slurms_queue_keeps_all_until_it_has_ended(root: Path, add_job: AddJob) -> None:
    record = add_job("queued", str(root / "runs" / "gone")) / "slurm.json"
    record.write_text('{"number": 7}')
    (root / "work" / "queued-n1").mkdir()
    assert removed_from(root) == UNUSED
    record.write_text('{"number": 7, "state": "COMPLETED"}')
    assert "work/queued-n1" in removed_from(root)


@pytest.mark.parametrize("folder", ["gs://bucket/runs/kept", "here"])
def test_a_kept_run_keeps_all_but_its_working_folder(root: Path, add_job: AddJob, folder: str) -> None:
    (root / "here").mkdir()
    add_job("kept", folder if folder != "here" else str(root / "here"), venv="top")
    for name, python in (("top", root / "venvs" / "base" / "bin" / "python"), ("base", Path("/usr/bin/python3"))):
        (root / "venvs" / name).mkdir()
        (root / "venvs" / name / "launch.json").write_text(json.dumps({"python": str(python)}))
    assert removed_from(root) == {*UNUSED, "work/kept"}


def test_an_environment_that_is_being_made_stays(root: Path) -> None:
    lock = machine.lock_file(root / "venvs" / "unused.lock", "")
    assert lock is not None
    assert removed_from(root) == UNUSED - {"venvs/unused"}
    os.close(lock)

"""A plan says by how much the code has grown since the job's newest run on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.command import launch


def warnings(folder: Path, target: str) -> list[str]:
    ran = launch(target, "job.yaml", "--dry-run", "-o", "json", cwd=folder)
    assert ran.code == 0, ran.err
    return [text for text in json.loads(ran.out)["warnings"] if "grown" in text]


@pytest.mark.parametrize("target", ["local", "vertex"])
def test_output_that_became_code_is_named(tmp_path: Path, target: str) -> None:
    (tmp_path / "work.py").write_text("")
    (tmp_path / "old.bin").write_bytes(b"x" * 2_000_000)
    os.utime(tmp_path / "old.bin", (0, 0))
    (tmp_path / "job.yaml").write_text("name: a\nmachine: {type: l4}\nregions: any\nrun: {script: work.py}\n")
    assert warnings(tmp_path, target) == []
    before = json.loads(launch("local", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path).out)
    for name, plan in {
        before["run"]: before,
        "a-longer-name-1": before | {"spec": {"name": "a-longer-name"}},
        "a-3": 3,
    }.items():
        (tmp_path / "runs" / name / "attempts").mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text(json.dumps(plan))
        (tmp_path / "runs" / name / "attempts" / "0001.json").touch()
    assert warnings(tmp_path, target) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ckpt.pt").write_bytes(b"x" * 12_000_000)
    os.utime(tmp_path / "out" / "ckpt.pt", (later := (tmp_path / "runs").stat().st_mtime + 9, later))
    (warning,) = warnings(tmp_path, target)
    assert "2.0 MB in 2 files -> 14 MB in 3 files" in warning
    assert "out/ckpt.pt (12 MB)" in warning
    assert "old.bin" not in warning
    assert before["run"] in warning

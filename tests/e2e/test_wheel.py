"""The installed package works outside the checkout: the specs and the container's recipe travel in the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.command import ROOT, WORLD

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_dry_run_from_the_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(pip, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert {"launcher/services/compute/startup.sh", "launcher/services/compute/mounts.sh"} <= set(names)
    command = [sys.executable, "-P", "-m", "launcher", "vertex", "--gpus", "2", "--type", "h100", "--dry-run"]
    env = {**WORLD, "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "a3-highgpu-2g" in ran.stdout
    where = [sys.executable, "-P", "-c", "import launcher; print(launcher.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) in found

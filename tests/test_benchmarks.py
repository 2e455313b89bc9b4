"""The benchmarks measure what an installed user has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import startup


def test_a_measured_process_keeps_its_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; sys.exit(sys.dont_write_bytecode)"
    command = startup.Command("keeps", (sys.executable, "-c", code))
    assert startup.cpu_seconds(command, str(tmp_path)) > 0  # it raises where the process doesn't exit 0


def test_bytecode_is_there_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in startup.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "module.py").write_text("")
    monkeypatch.setattr(startup, "ROOT", tmp_path)
    monkeypatch.setattr(startup, "commands", list)
    startup.measure(1)
    assert len(list(tmp_path.rglob("*.pyc"))) == len(startup.PACKAGES)

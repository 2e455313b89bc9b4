"""Orphans are found among this process's children."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.services.local import processes


def test_a_thread_that_ends_meanwhile_hides_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("1", None), ("2", "12 34 ")):
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "children").write_text(text)
    monkeypatch.setattr(processes, "Path", lambda _: tmp_path)
    assert processes.children() == [12, 34]

"""A project on loopback, and `launch selftest` for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.selftest.world import World, opened


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with opened(tmp_path) as world:
        monkeypatch.setattr("launcher.clock.REAL", world.time)
        yield world

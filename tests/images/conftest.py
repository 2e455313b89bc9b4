"""An engine that says what a test wrote down, and launch's client of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from launcher.images.docker_engine import Engine
from tests.images import scripted_engine
from tests.images.scripted_engine import BASE


@pytest.fixture
def double(tmp_path: Path) -> Iterator[scripted_engine.Engine]:
    with scripted_engine.Engine(tmp_path / "docker.sock") as running:
        running.has(BASE)
        yield running


@pytest.fixture
def environ(double: scripted_engine.Engine, tmp_path: Path) -> dict[str, str]:
    return {"DOCKER_HOST": double.host, "DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path), "TOKEN": "canary"}


@pytest.fixture
def engine(environ: Mapping[str, str]) -> Iterator[Engine]:
    made = Engine.connect(environ)
    yield made
    made.api.close()

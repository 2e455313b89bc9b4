"""For the commands that speak to a cloud."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.clock import Clock
from tests.cli.cloudjobs import WELL, Job
from tests.cli.vms import Vms
from tests.googlecloud import FakeClock, GoogleCloud
from tests.images.test_append import put_base
from tests.registry import OciRegistry


@pytest.fixture
def job(tmp_path: Path, cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.advance))
    cloud.jobs.script = WELL
    with OciRegistry() as registry:
        yield Job(tmp_path, cloud, f"{registry.host}/p/train@{put_base(registry, name='p/train')}")


@pytest.fixture
def vms(tmp_path: Path, cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vms]:
    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.advance))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield Vms(tmp_path, cloud, clock)
    time.tzset()

"""For the commands that speak to a cloud."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError

if TYPE_CHECKING:  # Google's libraries cost seconds: only the tests that use them pay
    from launcher.testing.googlecloud import FakeClock, GoogleCloud
    from tests.cli.cloudjobs import Job
    from tests.cli.vms import Vms


@pytest.fixture
def job(tmp_path: Path, cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    from tests.cli.cloudjobs import WELL, Job
    from tests.registry import OciRegistry, put_image

    over = threading.Event()

    def sleep(seconds: float) -> None:
        if over.is_set():  # a watch of a test that has ended would ask its closed cloud for ever, without a pause
            raise LaunchError("the test has ended")
        clock.advance(seconds)

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    cloud.jobs.script = WELL
    with OciRegistry() as registry:
        yield Job(tmp_path, cloud, f"{registry.host}/p/train@{put_image(registry, 'p/train')}")
    over.set()


@pytest.fixture
def vms(tmp_path: Path, cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vms]:
    from tests.cli.vms import Vms

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, clock.advance))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield Vms(tmp_path, cloud, clock)
    time.tzset()

"""A cloud for runs on VMs."""

from __future__ import annotations

import pytest

from launcher.testing.googlecloud import FakeClock, GoogleCloud
from tests.services.compute.vm_site import Site


@pytest.fixture
def site(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Where runs on VMs are launched; the run folder is found by the environment."""
    for name, value in cloud.environ().items():
        monkeypatch.setenv(name, value)
    return Site(cloud, clock)

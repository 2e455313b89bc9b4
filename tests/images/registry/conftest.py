"""A registry, and a client whose waits take no time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.images.registry import Registry
from launcher.testing.clock import FakeClock
from tests.images.registry.helpers import client
from tests.registry import OciRegistry


@pytest.fixture
def time() -> FakeClock:
    """The client's clock."""
    return FakeClock()


@pytest.fixture
def registry() -> Iterator[OciRegistry]:
    """A registry that is open to everybody."""
    with OciRegistry() as running:
        yield running


@pytest.fixture
def made(registry: OciRegistry, time: FakeClock) -> Iterator[Registry]:
    """A client of it."""
    with client(registry, time) as made:
        yield made

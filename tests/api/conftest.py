"""Fixtures for a user's Python program: a spec, and the loopback cloud."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.cloudjobs import Job
from tests.cli.conftest import job
from tests.command import WORLD, as_process

__all__ = ["job", "user"]


@pytest.fixture
def user(job: Job) -> Iterator[Job]:
    """The spec job.yaml in the current folder, with the project, the account and the endpoints in the environment."""
    with as_process(["python"], {**WORLD, **job.env}, job.folder):
        yield job

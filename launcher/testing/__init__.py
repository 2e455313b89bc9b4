"""A Google Cloud on loopback for tests (docs/ci.md): `pip install "gcp-launch[testing]"`.

    from launcher.testing import google_cloud  # in conftest.py: a pytest fixture

    def test_the_job_survives_a_preemption(google_cloud):
        google_cloud.next_jobs(PREEMPTED, SUCCEEDED)
        assert google_cloud.submit("job.yaml").wait().state == "SUCCEEDED"

Each name is imported when it is first used: `python -m launcher.testing.googlecloud`, the cloud on its own, needs no
pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import launcher.gcp  # noqa: F401 - Google's packages import only the services in use

if TYPE_CHECKING:
    from launcher.testing.fixture import (
        FAILED,
        NO_CAPACITY,
        PREEMPTED,
        RUNNING,
        SUCCEEDED,
        WAITING,
        LoopbackCloud,
        google_cloud,
    )

__all__ = [
    "FAILED",
    "NO_CAPACITY",
    "PREEMPTED",
    "RUNNING",
    "SUCCEEDED",
    "WAITING",
    "LoopbackCloud",
    "google_cloud",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.fixture"), name)

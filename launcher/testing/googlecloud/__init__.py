"""A small Google Cloud on loopback for Google's real clients.

It has Vertex CustomJobs and their logs, Cloud Storage, Compute instances, Artifact Registry's repositories, Cloud Build
and Secret Manager. It imports nothing from the launcher, and parses requests strictly into Google's own protobuf types,
so that it does not repeat an error of the code under test. `python -m launcher.testing.googlecloud --port 0` starts it
on its own.
"""

from __future__ import annotations

from launcher.testing.clock import FakeClock
from launcher.testing.googlecloud.compute.service import Pace, parse_bulk, parse_instance
from launcher.testing.googlecloud.faults import (
    Fault,
    Meanwhile,
    Reset,
    Slow,
    Stalled,
    Status,
    Torn,
    Truncated,
)
from launcher.testing.googlecloud.server import GoogleCloud
from launcher.testing.googlecloud.storage.objects import Bucket
from launcher.testing.googlecloud.vertex.jobs import Stage, parse_custom_job
from launcher.testing.googlecloud.vertex.processes import Runner
from launcher.testing.googlecloud.wire import ApiError, Recorded

__all__ = [
    "ApiError",
    "Bucket",
    "FakeClock",
    "Fault",
    "GoogleCloud",
    "Meanwhile",
    "Pace",
    "Recorded",
    "Reset",
    "Runner",
    "Slow",
    "Stage",
    "Stalled",
    "Status",
    "Torn",
    "Truncated",
    "parse_bulk",
    "parse_custom_job",
    "parse_instance",
]

"""The cloud of tests/compute, for runs on VMs."""

from __future__ import annotations

from tests.compute.conftest import site

__all__ = ["site"]

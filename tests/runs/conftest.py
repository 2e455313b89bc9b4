"""The cloud of tests/services/compute, for runs on VMs."""

from __future__ import annotations

from tests.services.compute.conftest import site

__all__ = ["site"]

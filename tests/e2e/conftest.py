"""Fixtures of the end-to-end tests, and which of them go to the same process (pytest -n 2 --dist loadgroup)."""

from __future__ import annotations

import pytest

from tests.e2e.engine import containers, torch_wheel

__all__ = ["containers", "torch_wheel"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that need an engine share one; the others of a file share its fixtures."""
    for item in items:
        if item.path.parent.name != "e2e":
            continue
        needs_engine = "containers" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("engine" if needs_engine else item.path.name))

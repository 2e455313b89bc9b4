"""Fixtures of the end-to-end tests, and which of them go to the same process (pytest -n 2 --dist loadgroup)."""

from __future__ import annotations

import pytest

from tests.e2e.engine import containers, torch_wheel

__all__ = ["containers", "torch_wheel"]

ENGINE = frozenset({"test_containers.py", "test_images.py", "test_local_docker.py"})
"""They share one Docker engine and its registry; the others one core."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two halves, side by side: an engine mostly waits for its disk."""
    for item in items:
        if item.path.parent.name == "e2e":
            item.add_marker(pytest.mark.xdist_group("engine" if item.path.name in ENGINE else "processes"))

"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from tests.e2e.engine import containers, torch_wheel

__all__ = ["containers", "torch_wheel"]

"""The Docker engine's fixtures, for the tests of `launch local --docker`."""

from __future__ import annotations

from tests.images.conftest import double, engine, environ

__all__ = ["double", "engine", "environ"]

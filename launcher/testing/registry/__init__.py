"""A small container registry on loopback, for clients of the OCI distribution API.

It does not import launch itself.
"""

from __future__ import annotations

from launcher.testing.registry.server import OciRegistry, put_image

__all__ = ["OciRegistry", "put_image"]

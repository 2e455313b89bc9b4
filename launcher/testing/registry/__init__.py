"""A small container registry on loopback, for clients of the OCI distribution API.

It does not import launch itself.

with OciRegistry(access=Bearer({"me": "secret"})) as registry:
    registry.faults.add(Fault("upload.finish", CutOff(5000)))
    ...                                   # a client of registry.host
assert registry.steps == ["upload.begin", ...]
"""

from __future__ import annotations

from launcher.testing.registry.access import Basic, Bearer
from launcher.testing.registry.api import Recorded, digest
from launcher.testing.registry.faults import AlterHeader, CutOff, Fault, LoseResponse, Refuse, Reset, Torn
from launcher.testing.registry.server import OciRegistry, put_image

__all__ = [
    "AlterHeader",
    "Basic",
    "Bearer",
    "CutOff",
    "Fault",
    "LoseResponse",
    "OciRegistry",
    "Recorded",
    "Refuse",
    "Reset",
    "Torn",
    "digest",
    "put_image",
]

"""A small container registry on loopback, for clients of the OCI distribution API.

It imports nothing of launch.

with OciRegistry(access=Bearer({"me": "secret"})) as registry:
    registry.faults.add(Fault("upload.chunk", CutOff(5000)))
    ...                                   # a client of registry.host
assert registry.steps == ["upload.begin", ...]
"""

from __future__ import annotations

from launcher.testing.registry.access import Basic, Bearer
from launcher.testing.registry.clock import FakeTime
from launcher.testing.registry.faults import CutOff, Fault, Forgets, Lost, Refuse, Reset, Says, Torn
from launcher.testing.registry.image import put_image
from launcher.testing.registry.server import OciRegistry
from launcher.testing.registry.wire import Recorded, digest

__all__ = [
    "Basic",
    "Bearer",
    "CutOff",
    "FakeTime",
    "Fault",
    "Forgets",
    "Lost",
    "OciRegistry",
    "Recorded",
    "Refuse",
    "Reset",
    "Says",
    "Torn",
    "digest",
    "put_image",
]

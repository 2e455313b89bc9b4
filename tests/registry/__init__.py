"""A small container registry on loopback, for clients of the OCI distribution API.

It imports nothing of launch.

with OciRegistry(access=Bearer({"me": "secret"})) as registry:
    registry.faults.add(Fault("upload.chunk", CutOff(5000)))
    ...                                   # a client of registry.host
assert registry.steps == ["upload.begin", ...]
"""

from __future__ import annotations

from tests.registry.access import Basic, Bearer
from tests.registry.clock import FakeTime
from tests.registry.faults import CutOff, Fault, Forgets, Lost, Refuse, Reset, Says, Torn
from tests.registry.server import OciRegistry
from tests.registry.wire import Recorded, digest

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
]

"""The registry of launcher.testing with access control, planned faults and slow answers.

with OciRegistry(access=Bearer({"me": "secret"})) as registry:
    registry.faults.add(Fault("upload.finish", CutOff(5000)))
    ...                                   # a client of registry.host
assert registry.steps == ["upload.begin", ...]
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from launcher.testing import registry
from launcher.testing.httpserver import Head, Response
from launcher.testing.registry import put_image
from launcher.testing.registry.api import Recorded, Request, digest
from tests.registry.access import Access, Basic, Bearer
from tests.registry.faults import AlterHeader, CutOff, Fault, Faults, LoseResponse, Refuse, Reset, Torn

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


class OciRegistry(registry.OciRegistry):
    """Each response is delayed by `latency` seconds of real time."""

    def __init__(self, *, access: Access | None = None, latency: float = 0.0, **options: Any) -> None:
        self.access = access
        self.latency = latency
        self.faults = Faults()
        super().__init__(**options)

    def performed(self, request: Request, head: Head) -> Response:
        effect = self.faults.meet(request.step)
        request = replace(request, body=head.read(effect.reads if effect else None))
        self._keep(request)
        if self.latency:
            time.sleep(self.latency)
        return effect(request, self._answer) if effect else self._answer(request)

    def _answer(self, request: Request) -> Response:
        if self.access and request.step == "token":
            return self.access.token(request)
        refused = self.access.refuse(request, self.url) if self.access else None
        return refused or super()._answer(request)

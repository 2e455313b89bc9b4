"""Parse what stands for a request on this machine: the lock of an attempt, with the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.services.request.model import JobRequest


def read(lock: Mapping[str, Any]) -> JobRequest:
    """Parse a lock. Its plan has the rest."""
    return JobRequest(
        provisioning=str(lock.get("provisioning") or ""),
        machine_type=str(lock.get("machine") or ""),
        gpus=0,
        nodes=1,
        account="",
        image="",
        output=str(lock.get("folder") or ""),
        words=(),
        env={},
    )

"""Parse and edit the request for a host: its name, the labels, and the job as a CustomJob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from launch_train.common import contract
from launcher.services.request import vertex
from launcher.services.request.model import JobRequest


def read(request: Mapping[str, Any]) -> JobRequest:
    parsed = vertex.read(request["job"])
    processes = int(parsed.env.get(contract.PROCESSES, parsed.gpus))  # also where the processes have no GPUs
    return replace(parsed, provisioning="standard", machine_type=str(request["host"]), image="", gpus=processes)


def limit(request: Mapping[str, Any]) -> int:
    """Return the job's time limit in seconds."""
    return vertex.limit(request["job"])


def with_limit(request: Mapping[str, Any], seconds: int) -> Mapping[str, Any]:
    return {**request, "job": vertex.with_limit(request["job"], seconds)}


def wait(_request: Mapping[str, Any]) -> int:
    """Return 0: a host is there or not."""
    return 0


def with_env(request: Mapping[str, Any], name: str, value: str) -> Mapping[str, Any]:
    """Return the request with one more environment variable."""
    return {**request, "job": vertex.with_env(request["job"], name, value)}

"""The fields of a request, in terms that are independent of the service."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class JobRequest(Struct, frozen=True, kw_only=True):
    """A job's request. An empty field is unknown."""

    provisioning: str
    machine_type: str
    gpus: int
    """GPUs per node."""
    nodes: int
    account: str
    image: str
    output: str
    """The output location: a run folder or a job's base directory."""
    words: tuple[str, ...]
    """The command and its arguments."""
    env: Mapping[str, str]

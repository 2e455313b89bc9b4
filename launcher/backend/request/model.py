"""What a request asks for, in the words of neither service."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class JobRequest(Struct, frozen=True, kw_only=True):
    """What a job's request says. Empty is unknown."""

    provisioning: str
    machine_type: str
    gpus: int
    """On each node."""
    nodes: int
    account: str
    image: str
    output: str
    """Where it writes: a run's folder, or a job's base directory."""
    words: tuple[str, ...]
    """The command and its arguments."""
    env: Mapping[str, str]

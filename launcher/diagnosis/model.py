"""The vocabulary of a diagnosis: scope, kind, cause and fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Scope = Literal["permanent", "project", "region", "region+provisioning", "zone", "transient"]
"""How far it reaches: everywhere; the project; that region with every provisioning model; that pair alone; that zone;
or nothing but this moment."""

Kind = Literal[
    "quota",
    "stockout",
    "waited",
    "preempted",
    "machine",
    "permission",
    "credentials",
    "project",
    "disabled",
    "invalid",
    "image",
    "output",
    "busy",
    "unfit",
    "lost",
    "user",
    "cancelled",
    "expired",
    "succeeded",
    "unknown",
]


class Refusal(Struct, frozen=True, kw_only=True):
    """An API's error as data. `code` is HTTP's status; `reason` and `metadata` are google.rpc.ErrorInfo's, or the
    older APIs' errors[].reason."""

    code: int
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = {}
    service: str = "aiplatform"
    """The host's first label, as in `gcloud services enable SERVICE.googleapis.com`."""
    retry_after: float = 0.0


class Tried(Struct, frozen=True, kw_only=True):
    """What was asked for, as far as a cause or a fix may have to name it. Empty is unknown."""

    project: str
    region: str
    provisioning: str
    zone: str | None = None
    machine_type: str = ""
    gpus: int = 0
    """Of all nodes together: what a quota is asked for."""
    account: str = ""
    """Of the job; empty is Vertex AI's own."""
    image: str = ""
    output: str = ""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """`cause` and `fix` are sentences for a person; `fix` is a command where there is one."""

    scope: Scope
    kind: Kind
    cause: str
    fix: str = ""
    retry_after: float = 0.0
    zones: tuple[str, ...] = ()
    """Where there are machines, as far as the refusal itself names zones (Compute Engine)."""

"""Data types of a diagnosis, and how messages of APIs and logs are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from launcher.errors import LaunchError

Scope = Literal["permanent", "project", "region", "region+provisioning", "zone", "transient"]
"""Where else the cause applies: everywhere; in the whole project; in the region with every provisioning model; in the
region with this provisioning model; in the zone; only at this moment."""

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


class CreateRefused(LaunchError):
    """The service refused to create the job. Nothing was created."""

    def __init__(self, problem: str, refusal: Refusal) -> None:
        super().__init__(problem)
        self.refusal = refusal


class RequestContext(Struct, frozen=True, kw_only=True):
    """The request's properties that a cause or a fix may name. Empty: unknown."""

    project: str
    region: str
    provisioning: str
    zone: str | None = None
    machine_type: str = ""
    gpus: int = 0
    """Of all nodes together, as quotas count them."""
    account: str = ""
    """The job's service account; empty: Vertex AI's own."""
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
    """Zones with capacity that the refusal itself names (Compute Engine)."""


MOST = 500
"""Characters of a message that are shown."""


def plain(text: str) -> str:
    """Return a message as one line without control characters, shortened to MOST characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MOST else f"{line[: MOST - 2]} …"


def first(pattern: str, text: str) -> str:
    """Return the first group of the first match, ignoring case; empty if there is none."""
    match = re.search(pattern, text, re.IGNORECASE)
    return match[1] if match else ""

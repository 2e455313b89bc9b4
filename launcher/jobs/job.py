"""A job in the cloud as data: its state when its service was last polled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

RUN_LABEL: Final = "launch-run"
"""The run id, by which a run is found from any machine."""
IDENTITY_LABEL: Final = "launch-identity"
"""A hash of the computation and its owner (plan.names.identity); a run id belongs to one identity."""

PLAN_LABEL: Final = "launch-plan"
"""The digest of the plan that a CustomJob was created from (plan.binding)."""

RESOURCE: Final = re.compile(r"projects/[^/]+/(?:locations|zones)/[a-z0-9-]+/(?:customJobs|instances)/\d+")
"""A job's name (Job.name)."""

WAITING: Final = frozenset({"QUEUED", "PENDING"})
"""Nothing is billed yet. QUEUED may also mean that quota is missing: Vertex AI queues for that too."""
ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})
"""Final states (google.cloud.aiplatform_v1.JobState). An unknown state is not final."""

GONE: Final = "DELETED"
"""launch's own state of a job that existed and was deleted."""


def command(*, vm: bool) -> str:
    """Return the command that launches a run on VMs or on Vertex AI."""
    return "launch vm SPEC --run" if vm else "launch vertex SPEC"


class Failure(Struct, frozen=True, kw_only=True):
    """A job's own error (google.rpc.Status): `code` is google.rpc.Code's number, 8 is RESOURCE_EXHAUSTED. Of a VM's
    operation `reason` is its error code (ZONE_RESOURCE_POOL_EXHAUSTED), `metadata` its ErrorInfo's."""

    code: int
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = {}


class Job(Struct, frozen=True, kw_only=True):
    """A job. Times are Unix seconds by Google's clock; None: not yet."""

    name: str
    """projects/NUMBER/locations/REGION/customJobs/ID, or projects/PROJECT/zones/ZONE/instances/NUMBER: a VM that trains
    (of several the first), by its number, as another may have its name later."""
    region: str
    state: str
    """Without its prefix: QUEUED, RUNNING, …; as the service reports it, even if unknown here."""
    created: float
    started: float | None = None
    ended: float | None = None
    error: Failure | None = None
    labels: Mapping[str, str] = {}
    request: Mapping[str, Any] = {}
    """The request: displayName, jobSpec, labels, encryptionSpec, as canonical proto3 JSON; for a VM its current
    Instance."""

    folder: str = ""
    """The run folder; VMs only, as nothing else has the job's state after its end."""

    @property
    def handle(self) -> str:
        """The name by which the user finds the run: its folder, its id, or the job's name."""
        return self.folder or self.run or self.name

    @property
    def id(self) -> str:
        """The last part of the name; in the container CLOUD_ML_JOB_ID."""
        return self.name.rpartition("/")[2]

    @property
    def place(self) -> str:
        """The zone, or the region if Google chooses the zone."""
        return self.zone or self.region

    @property
    def zone(self) -> str | None:
        """The zone of a VM; None on Vertex AI."""
        return self.name.split("/")[3] if "/zones/" in self.name else None

    @property
    def run(self) -> str:
        """The run id; empty for a job that launch did not create."""
        return self.labels.get(RUN_LABEL, "")

    @property
    def is_workplace(self) -> bool:
        """Return whether it is a VM to work on, without a training job."""
        return self.zone is not None and IDENTITY_LABEL not in self.labels

    @property
    def has_ended(self) -> bool:
        """Return whether the job is in a final state."""
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended or was deleted."""
        return self.has_ended or self.state == GONE

    @property
    def billed(self) -> float:
        """Seconds from start to end; 0 if either is unknown."""
        return max(0.0, self.ended - self.started) if self.started and self.ended else 0.0

    @property
    def waited(self) -> float:
        """Seconds from creation to start, or to the end if it never started; 0 if unknown."""
        until = self.started or self.ended
        return max(0.0, until - self.created) if until and self.created else 0.0

    @property
    def is_waiting(self) -> bool:
        """Return whether the job waits for machines."""
        return self.state in WAITING

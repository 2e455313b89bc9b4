"""A job in the cloud as data: what its service said of it when it was last asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

RUN_LABEL: Final = "launch-run"
"""The run's id: by this label a run is found from anywhere."""
IDENTITY_LABEL: Final = "launch-identity"
"""A hash of what is computed and for whom (plan.names.identity): one run id belongs to one of them."""

PLAN_LABEL: Final = "launch-plan"
"""The digest of the plan that a CustomJob was created from (plan.binding)."""

RESOURCE: Final = re.compile(r"projects/[^/]+/(?:locations|zones)/[a-z0-9-]+/(?:customJobs|instances)/\d+")
"""A job's name (Job.name)."""

WAITING: Final = frozenset({"QUEUED", "PENDING"})
"""Nothing is billed yet. QUEUED may also mean that quota is missing: Vertex AI queues for that too."""
ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})
"""States that a job doesn't leave (google.cloud.aiplatform_v1.JobState). One that we don't know is none of them."""

GONE: Final = "DELETED"
"""Our own word for the state of a job that was there and is gone."""


def command(*, vm: bool) -> str:
    """What launches a run, on VMs or on Vertex AI."""
    return "launch vm SPEC --run" if vm else "launch vertex SPEC"


class Failure(Struct, frozen=True, kw_only=True):
    """A job's own error (google.rpc.Status): `code` is google.rpc.Code's number, 8 is RESOURCE_EXHAUSTED. Of a VM's
    operation `reason` is its error code (ZONE_RESOURCE_POOL_EXHAUSTED), `metadata` its ErrorInfo's."""

    code: int
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = {}


class Job(Struct, frozen=True, kw_only=True):
    """A job. Times are Unix seconds by Google's clock; None: that hasn't happened."""

    name: str
    """projects/NUMBER/locations/REGION/customJobs/ID, or projects/PROJECT/zones/ZONE/instances/NUMBER: a VM that trains
    (of several the first), by its number, as another may have its name later."""
    region: str
    state: str
    """Without its prefix: QUEUED, RUNNING, …; whatever the service says, known here or not."""
    created: float
    started: float | None = None
    ended: float | None = None
    error: Failure | None = None
    labels: Mapping[str, str] = {}
    request: Mapping[str, Any] = {}
    """What was asked for: displayName, jobSpec, labels, encryptionSpec, as canonical proto3 JSON; of a VM the Instance
    as it is."""

    folder: str = ""
    """The run's folder, where nothing else tells of the job once it has ended: of VMs."""

    @property
    def handle(self) -> str:
        """By what a person finds its run: the run's id, or its folder."""
        return self.folder or self.run or self.name

    @property
    def id(self) -> str:
        """The last part of the name; in the container CLOUD_ML_JOB_ID."""
        return self.name.rpartition("/")[2]

    @property
    def place(self) -> str:
        """Its zone, or its region where Google chooses the zone."""
        return self.zone or self.region

    @property
    def zone(self) -> str | None:
        """Of a VM; None on Vertex AI."""
        return self.name.split("/")[3] if "/zones/" in self.name else None

    @property
    def run(self) -> str:
        """The run's id; empty for a job that isn't launch's."""
        return self.labels.get(RUN_LABEL, "")

    @property
    def is_workplace(self) -> bool:
        """Whether it is a VM to work on, which computes nothing."""
        return self.zone is not None and IDENTITY_LABEL not in self.labels

    @property
    def has_ended(self) -> bool:
        """Whether it has come to an end. A state that we don't know is none."""
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """Whether it will never run again: it has ended, or was deleted."""
        return self.has_ended or self.state == GONE

    @property
    def billed(self) -> float:
        """Seconds from its start to its end; 0 where one of them isn't known."""
        return max(0.0, self.ended - self.started) if self.started and self.ended else 0.0

    @property
    def waited(self) -> float:
        """Seconds from its creation to its start, or to its end where it never started; 0 where that isn't known."""
        until = self.started or self.ended
        return max(0.0, until - self.created) if until and self.created else 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for machines."""
        return self.state in WAITING

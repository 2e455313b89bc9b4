"""A cloud job as data: its state when the service was last polled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

RUN_ID: Final = r"[a-z][a-z0-9-]*-[0-9a-f]{8}(-\d+)?"
"""`<name>-<8 hex>`, with the number that `--new` adds. An ID set with --run-id may differ."""
RUN_LABEL: Final = "launch-run"
"""The run id. Any machine finds the run by this label."""
IDENTITY_LABEL: Final = "launch-identity"
"""A hash of the computation and its owner (plan.run_id.compute_identity). A run id belongs to one identity."""

OWNER_LABEL: Final = "launch-owner"
"""The gcloud account that submitted the run, hashed by default (plan.owner)."""
SWEEP_LABEL: Final = "launch-sweep"
"""The name of the sweep that a run is a point of."""
PLAN_LABEL: Final = "launch-plan"
"""The digest of the plan that created a CustomJob (plan.binding)."""

SLURM_LABEL: Final = "slurm-job"
"""The number of a job in Slurm."""

RESOURCE: Final = r"projects/[^/]+/(?:locations|zones)/[a-z0-9-]+/(?:customJobs|instances)/\d+"
"""The name of a job on Google Cloud (Job.name)."""
ON_HOST: Final = r"on/[^/\s]+/[0-9a-f-]{36}"
"""The name of a job on a host that is reached by SSH."""

WAITING: Final = frozenset({"QUEUED", "PENDING"})
"""Nothing is billed yet. Vertex AI also reports QUEUED while quota is missing."""
ENDED: Final = frozenset(
    {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED", "INTERRUPTED", "UNKNOWN"}
)
"""Final states (google.cloud.aiplatform_v1.JobState). An unknown state is not final. The last two are of a run on this
machine: it was stopped or its supervisor was killed; its records are unreadable."""
LOCAL: Final = "local"
"""The region of a job on this machine."""

GONE: Final = "DELETED"
"""launch's own state for a job that was deleted."""


def command(*, vm: bool) -> str:
    """Return the command that launches a run on VMs or on Vertex AI."""
    return "launch vm SPEC --run" if vm else "launch vertex SPEC"


class Failure(Struct, frozen=True, kw_only=True):
    """A job's own error (google.rpc.Status). `code` is a number of google.rpc.Code, such as 8 for RESOURCE_EXHAUSTED.

    For a VM's operation, `reason` is the operation's error code (ZONE_RESOURCE_POOL_EXHAUSTED), and `metadata` comes
    from its ErrorInfo.
    """

    code: int
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = {}


class Job(Struct, frozen=True, kw_only=True):
    """A job. Times are Unix seconds by Google's clock. None: not yet known."""

    name: str
    """The name of the Job resource.

    projects/NUMBER/locations/REGION/customJobs/ID on Vertex AI, or projects/PROJECT/zones/ZONE/instances/NUMBER for a
    training VM. With several VMs it is the first one's. VMs are identified by number, because a later VM may reuse the
    name. On this machine it is the path of the run folder. Elsewhere it is TARGET/ID.
    """
    region: str
    state: str
    """The state without its prefix: QUEUED, RUNNING, …. An unknown state is kept as the service reports it."""
    created: float
    started: float | None = None
    ended: float | None = None
    error: Failure | None = None
    labels: Mapping[str, str] = {}
    request: Mapping[str, Any] = {}
    """The request as canonical proto3 JSON: displayName, jobSpec, labels and encryptionSpec.

    For a VM it is the current Instance, on this machine the lock of the newest attempt.
    """

    reason: str = ""
    """Why it waits, in words; empty: unknown, or it doesn't."""

    folder: str = ""
    """The run folder, as commands name it. Only VMs and jobs on this machine have it: only their run folder records how
    they ended."""

    @property
    def handle(self) -> str:
        """Return the run's folder, run id or job name, whichever is known first."""
        return self.folder or self.run or self.name

    @property
    def id(self) -> str:
        """Return the last part of the name. The container has it in CLOUD_ML_JOB_ID."""
        return self.name.rpartition("/")[2]

    @property
    def place(self) -> str:
        """Return the zone, or the region if Google chooses the zone."""
        return self.zone or self.region

    @property
    def zone(self) -> str | None:
        """Return the zone of a VM, or None on Vertex AI."""
        return self.name.split("/")[3] if "/zones/" in self.name else None

    @property
    def is_here(self) -> bool:
        return self.region == LOCAL

    @property
    def begun(self) -> float:
        """Return when its attempt began: its creation; on this machine, where a run has one job, its newest start."""
        return self.started or self.created if self.is_here else self.created

    @property
    def target(self) -> str:
        """Return where it runs: local, vertex, vm, or another target, with which its name begins."""
        if self.is_here:
            return LOCAL
        first = self.name.partition("/")[0]
        return first if first != "projects" else "vm" if self.zone else "vertex"

    @property
    def is_missing(self) -> bool:
        """Return whether it stands for a run on a host that has a folder there, and no job."""
        return self.target == "on" and self.id == self.run

    @property
    def command(self) -> str:
        if self.target == "on":
            return (
                f"launch slurm SPEC --on {self.region}" if "script" in self.request else f"launch on {self.region} SPEC"
            )
        return command(vm=True) if self.target == "vm" else f"launch {self.target} SPEC"

    @property
    def run(self) -> str:
        """Return the run id. Empty for a job that launch did not create."""
        return self.id if self.is_here else self.labels.get(RUN_LABEL, "")  # a folder may have been copied

    @property
    def is_workplace(self) -> bool:
        """Return whether this is a workstation VM without a training job."""
        return self.zone is not None and IDENTITY_LABEL not in self.labels

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended or was deleted."""
        return self.has_ended or self.state == GONE

    @property
    def billed(self) -> float:
        """Return the seconds from start to end, or 0 if either is unknown."""
        return max(0.0, self.ended - self.started) if self.started and self.ended else 0.0

    @property
    def waited(self) -> float:
        """Return the seconds from creation to the start, or to the end if it never started. 0 if unknown."""
        until = self.started or self.ended
        return max(0.0, until - self.created) if until and self.created else 0.0

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

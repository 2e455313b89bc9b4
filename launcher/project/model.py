"""The requirements for a project, and the results of checks, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from launcher.catalog.model import QuotaFigures
from launcher.errors import LaunchError
from launcher.gcp.api import status_of, words
from launcher.plan.model import Attempt

Status = Literal["ok", "warning", "failed", "unknown"]
ORDER: Final[tuple[Status, ...]] = ("failed", "warning", "unknown", "ok")

Found = Mapping[str, Any]
"""Name of a read -> the JSON answer; None: the resource does not exist; LaunchError: it could not be read."""


class Check(Struct, frozen=True):
    """The result of one check.

    `failed` means that a job can't be created or can't work, in a region or zone (`place`; empty: any) with a
    provisioning model on a machine type (empty: any). `unknown` never refuses anything.
    """

    name: str
    status: Status
    text: str
    fix: str = ""
    """Commands to paste, one per line."""
    place: str = ""
    provisioning: str = ""
    machine_type: str = ""
    ends: str | UnsetType = UNSET
    """RFC 3339: when the attempt's reservation ends."""
    quotas: tuple[QuotaFigures, ...] = ()
    """The figures in `text`, for a table."""

    def applies_to(self, attempt: Attempt) -> bool:
        """Return whether the check is about an attempt's placement."""
        return (
            self.place in ("", attempt.region, attempt.zone)
            and self.provisioning in ("", attempt.provisioning)
            and self.machine_type in ("", attempt.machine_type)
        )


class GpuNeed(Struct, frozen=True, kw_only=True):
    """The GPUs that one placement uses of a quota. `metric`: without its service."""

    metric: str
    gpus: int
    region: str
    provisioning: str
    machine_type: str = ""
    is_exact: bool = True
    """False: the metric was derived from the accelerator's name, because the catalog lacks it."""


class ReservationNeed(Struct, frozen=True, kw_only=True):
    """A reservation (projects/P/zones/Z/reservations/R) and the machines that a placement takes from it."""

    name: str
    machine_type: str
    nodes: int
    region: str
    dense: bool | None = None
    """vm.dense_reservation; None: it has no effect on the request."""


class SubnetworkNeed(Struct, frozen=True, kw_only=True):
    """A subnetwork of another project (Shared VPC) that VMs are attached to."""

    project: str
    """The host project."""
    region: str
    name: str
    external_ip: bool


class Needs(Struct, frozen=True, kw_only=True):
    """What jobs on Vertex AI, or VMs, need of a project."""

    project: str
    service: Literal["vertex", "vm"] = "vertex"
    apis: tuple[str, ...] = ()
    bucket: str = ""
    """Name of the output's bucket; empty: the job has no output in a bucket."""
    regions: tuple[str, ...] = ()
    account: str = ""
    """The job's service account; empty: Vertex AI's custom code service agent, or Compute Engine's default account."""
    image: str = ""
    """An image with its digest, which must exist."""
    repository: str = ""
    """An Artifact Registry repository (resource name), which must exist."""
    creates_repository: bool = False
    """True: the launch creates the repository."""
    secrets: tuple[str, ...] = ()
    """Versions: projects/P/secrets/S/versions/V."""
    gpus: tuple[GpuNeed, ...] = ()
    lists_quotas: bool = False
    """True: no job is planned, so the GPUs with any quota are listed."""
    reservations: tuple[ReservationNeed, ...] = ()
    key: str = ""
    """The spec's encryption key: projects/P/locations/L/keyRings/R/cryptoKeys/K."""
    subnetworks: tuple[SubnetworkNeed, ...] = ()
    external_ip: bool = False
    """True: VMs with external IP addresses."""
    image_project: str = ""
    """The project of the VMs' boot image."""

    @property
    def api(self) -> str:
        return "aiplatform.googleapis.com" if self.service == "vertex" else "compute.googleapis.com"

    def job_account(self, number: str) -> str:
        """Return the account that a job runs as; empty: it depends on the project's unknown number."""
        default = agent(number) if self.service == "vertex" else f"{number}-compute@developer.gserviceaccount.com"
        return self.account or (default if number else "")

    def pulling_account(self, number: str) -> str:
        """Return the account that pulls a job's image; empty: unknown. VMs pull it themselves."""
        return self.job_account(number) if self.service == "vm" else agent(number) if number else ""


def by_severity(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the checks, failures first."""
    return tuple(sorted(checks, key=lambda check: ORDER.index(check.status)))


UNEXPECTED: Final = (KeyError, TypeError, ValueError, AttributeError)
"""Exceptions raised by an answer of an unexpected shape. Its content is unknown, which is no reason to refuse a job."""


def agent(number: str) -> str:
    """Return Vertex AI's custom code service agent: it pulls images, and runs jobs without an account."""
    return f"service-{number}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"


def unread(name: str, error: LaunchError, text: str = "not checked") -> Check:
    """Return the result of a check whose read failed, with the reason."""
    fix = error.hint.partition("; then ")[0].partition(", or run as")[0]  # the rest of the line is no command
    return Check(name, "unknown", f"{text}: {words(error.problem)}", fix)


def answer(found: Found, name: str) -> Any:
    """Return the result of a read; None if it was not read, or if the resource does not exist."""
    result = found.get(name)
    return None if isinstance(result, LaunchError) else result


def settled(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers with None in place of each 404."""
    return {
        name: None if isinstance(result, LaunchError) and status_of(result) == 404 else result
        for name, result in answers.items()
    }

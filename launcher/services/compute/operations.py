"""Compute Engine's operations as data: what was requested for a VM, by whom, and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from launcher.diagnosis import Refusal
from launcher.jobs.vm import last_url_part, seconds

COMPANIONS: Final = frozenset({"VM_MIN_COUNT_NOT_REACHED"})
"""Codes that only report the effect of another error of the same operation."""


class OperationError(Struct, frozen=True, kw_only=True):
    """One of an operation's errors. `reason` and `metadata` come from its ErrorInfo.

    For a quota, the metadata has quota_metric, quota_limit (Cloud Quotas' id), quota_limit_value, and its dimensions
    (region, gpu_family).
    """

    code: str
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = {}


class Operation(Struct, frozen=True, kw_only=True):
    """A zonal operation. Times are Unix seconds by Google's clock. None: not yet."""

    name: str
    project: str
    zone: str
    kind: str
    """insert, bulkInsert, delete, stop, start, setMetadata, compute.instances.preempted, …"""
    target: str
    """The number of its VM. Empty for an operation on several VMs (bulkInsert)."""
    target_name: str
    status: str
    """PENDING, RUNNING or DONE."""
    group: str
    """The id of its group, which a bulkInsert and its VMs' inserts share. Empty: no group."""
    request_id: str
    """The id of the request. Empty: it had none."""
    user: str
    """The email of the user or service account that requested it, or "system"."""
    inserted: float
    ended: float | None = None
    http_status: int = 0
    """The HTTP status, if it failed."""
    errors: tuple[OperationError, ...] = ()

    @property
    def done(self) -> bool:
        """Return whether it has ended, successful or not."""
        return self.status == "DONE"

    @property
    def failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self.done and (bool(self.errors) or self.http_status >= 400)

    @property
    def refusal(self) -> Refusal:
        """Return its most informative error as a refusal."""
        error = next((error for error in self.errors if error.code not in COMPANIONS), None)
        error = error or next(iter(self.errors), OperationError(code="", message=f"HTTP {self.http_status}"))
        code = self.http_status or 400
        return Refusal(code=code, message=error.message, reason=error.code, metadata=error.metadata, service="compute")


def operation_of(operation: Mapping[str, Any]) -> Operation:
    """Parse an Operation in canonical proto3 JSON."""
    return Operation(
        name=operation.get("name", ""),
        project=operation_project(operation.get("zone", "")),
        zone=last_url_part(operation.get("zone", "")),
        kind=operation.get("operationType", ""),
        target=str(operation.get("targetId", "")),
        target_name=last_url_part(operation.get("targetLink", "")),
        status=operation.get("status", ""),
        group=operation.get("operationGroupId", ""),
        request_id=operation.get("clientOperationId", ""),
        user=operation.get("user", ""),
        inserted=seconds(operation.get("insertTime")) or 0.0,
        ended=seconds(operation.get("endTime")),
        http_status=int(operation.get("httpErrorStatusCode", 0)),
        errors=tuple(map(operation_error, operation.get("error", {}).get("errors", ()))),
    )


def operation_project(zone: str) -> str:
    """Return the project in a zone's URL: …/projects/PROJECT/zones/ZONE."""
    return zone.rpartition("/zones/")[0].rpartition("/")[2]


def operation_error(error: Mapping[str, Any]) -> OperationError:
    """Parse one of error.errors[]."""
    details = error.get("errorDetails", ())
    info: Mapping[str, Any] = next((each["errorInfo"] for each in details if "errorInfo" in each), {})
    quota: Mapping[str, Any] = next((each["quotaInfo"] for each in details if "quotaInfo" in each), {})
    # A QuotaExceededInfo under the names that a refused request's ErrorInfo uses for the same values.
    quota_facts = {
        **quota.get("dimensions", {}),
        "quota_metric": quota.get("metricName"),
        "quota_limit": quota.get("limitName"),
        "quota_limit_value": f"{quota['limit']:g}" if "limit" in quota else None,
    }
    return OperationError(
        code=error.get("code", ""),
        message=error.get("message", ""),
        reason=info.get("reason", ""),
        metadata={**texts(info.get("metadatas", {})), **texts(quota_facts)},
    )


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert values to strings, without those that are None or empty."""
    return {str(name): str(value) for name, value in values.items() if value not in (None, "")}

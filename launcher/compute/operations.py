"""Operations of Compute Engine as data: what was begun on a VM, by whom, and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from launcher.diagnosis import Refusal
from launcher.jobs.vm import last, seconds

COMPANIONS: Final = frozenset({"VM_MIN_COUNT_NOT_REACHED"})
"""Codes that only say that another error of the same operation had its effect."""


class OperationError(Struct, frozen=True, kw_only=True):
    """One of an operation's errors. `reason` and `metadata` are its ErrorInfo's; of a quota the metadata has
    quota_metric, quota_limit (Cloud Quotas' id), quota_limit_value, and its dimensions (region, gpu_family)."""

    code: str
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = {}


class Operation(Struct, frozen=True, kw_only=True):
    """An operation of a zone. Times are Unix seconds by Google's clock; None: that hasn't happened."""

    name: str
    project: str
    zone: str
    kind: str
    """insert, bulkInsert, delete, stop, start, setMetadata, compute.instances.preempted, …"""
    target: str
    """The number of the VM that it is about; empty of one about several (bulkInsert)."""
    target_name: str
    status: str
    """PENDING, RUNNING or DONE."""
    group: str
    """What it belongs to: the VMs of one bulkInsert have an insert each. Empty of one by itself."""
    request_id: str
    """The id that the request carried; empty: none."""
    user: str
    """Who began it: a person's or a service account's email, or "system"."""
    inserted: float
    ended: float | None = None
    http_status: int = 0
    """HTTP's status of its end, if that was an error."""
    errors: tuple[OperationError, ...] = ()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status == "DONE"

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.done and (bool(self.errors) or self.http_status >= 400)

    @property
    def refusal(self) -> Refusal:
        """Its most telling error, as a refusal."""
        told = next((error for error in self.errors if error.code not in COMPANIONS), None)
        told = told or next(iter(self.errors), OperationError(code="", message=f"HTTP {self.http_status}"))
        code = self.http_status or 400
        return Refusal(code=code, message=told.message, reason=told.code, metadata=told.metadata, service="compute")


def operation_of(operation: Mapping[str, Any]) -> Operation:
    """An Operation as canonical proto3 JSON, as data."""
    return Operation(
        name=operation.get("name", ""),
        project=project_of(operation.get("zone", "")),
        zone=last(operation.get("zone", "")),
        kind=operation.get("operationType", ""),
        target=str(operation.get("targetId", "")),
        target_name=last(operation.get("targetLink", "")),
        status=operation.get("status", ""),
        group=operation.get("operationGroupId", ""),
        request_id=operation.get("clientOperationId", ""),
        user=operation.get("user", ""),
        inserted=seconds(operation.get("insertTime")) or 0.0,
        ended=seconds(operation.get("endTime")),
        http_status=int(operation.get("httpErrorStatusCode", 0)),
        errors=tuple(map(error_of, operation.get("error", {}).get("errors", ()))),
    )


def project_of(zone: str) -> str:
    """The project in a zone's URL: …/projects/PROJECT/zones/ZONE."""
    return zone.rpartition("/zones/")[0].rpartition("/")[2]


def error_of(error: Mapping[str, Any]) -> OperationError:
    """One of error.errors[]."""
    details = error.get("errorDetails", ())
    info: Mapping[str, Any] = next((each["errorInfo"] for each in details if "errorInfo" in each), {})
    quota: Mapping[str, Any] = next((each["quotaInfo"] for each in details if "quotaInfo" in each), {})
    return OperationError(
        code=error.get("code", ""),
        message=error.get("message", ""),
        reason=info.get("reason", ""),
        metadata={**texts(info.get("metadatas", {})), **of_quota(quota)},
    )


def of_quota(quota: Mapping[str, Any]) -> dict[str, str]:
    """A QuotaExceededInfo, by the names that the ErrorInfo of a refused request has for the same."""
    if not quota:
        return {}
    told = {"quota_metric": quota.get("metricName"), "quota_limit": quota.get("limitName")}
    limit = {"quota_limit_value": f"{quota['limit']:g}"} if "limit" in quota else {}
    return {**texts(quota.get("dimensions", {})), **texts(told), **limit}


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Names with texts, without those that say nothing."""
    return {str(name): str(value) for name, value in values.items() if value not in (None, "")}

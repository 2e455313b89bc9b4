"""Refusals in the two formats of Google's APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""google.rpc.Code by HTTP status (google/rpc/code.proto)."""


class Violation(NamedTuple):
    """An invalid field. `field` is dotted, as Google writes it: job_spec.worker_pool_specs[0]."""

    field: str
    message: str


class ApiError(Exception):
    """A refusal: an HTTP code, Google's message and, for the older JSON APIs, a reason such as ``conditionNotMet``.

    `info` is the reason in the newer APIs' google.rpc.ErrorInfo, such as SERVICE_DISABLED, and `metadata` its metadata.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        status: str = "",
        info: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.info = info
        self.metadata = dict(metadata or {})
        self.status = status or STATUS.get(code, "UNKNOWN")

    def body(self) -> dict[str, Any]:
        """Return the JSON: google.rpc.Status for the newer APIs, errors[] with a reason for Compute and Storage."""
        return {"error": self._with_reason() if self.reason else self._rpc_status()}

    def _with_reason(self) -> dict[str, Any]:
        domain = "usageLimits" if self.reason in ("rateLimitExceeded", "quotaExceeded") else "global"
        entry = {"message": self.message, "domain": domain, "reason": self.reason}
        return {"code": self.code, "message": self.message, "errors": [entry]}

    def _rpc_status(self) -> dict[str, Any]:
        status: dict[str, Any] = {"code": self.code, "message": self.message, "status": self.status}
        if self.violations:
            fields = [{"field": field, "description": message} for field, message in self.violations]
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": fields}]
        elif self.info:
            what: dict[str, Any] = {"reason": self.info, "domain": "googleapis.com"}
            what |= {"metadata": self.metadata} if self.metadata else {}
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", **what}]
        return status


def found_errors(violations: list[Violation]) -> ApiError:
    """Return Vertex AI's error with all violations of a request (format seen in answers of Vertex AI)."""
    listed = [f"{n}.Field: {field}; Message: {message}" for n, (field, message) in enumerate(violations, 1)]
    return ApiError(400, "\t".join(["List of found errors:", *listed, ""]), violations=tuple(violations))

"""Diagnose refusals by Google's APIs and the ends of jobs: scope, cause and fix. Pure.

The patterns match messages seen in answers of Vertex AI and Compute Engine. An unknown message is reported verbatim and
classified by its status.
"""

from __future__ import annotations

from launcher.diagnosis.api_error import diagnose_refusal
from launcher.diagnosis.job_end import diagnose_end
from launcher.diagnosis.model import Diagnosis, Kind, Refusal, RequestContext, Scope
from launcher.errors import JobFailed, LaunchError, NoCapacity, NotAuthorised, UsageError

__all__ = ["Diagnosis", "Kind", "Refusal", "RequestContext", "Scope", "diagnose_end", "diagnose_refusal", "error_of"]

ERRORS: dict[Kind, type[LaunchError]] = {
    "invalid": UsageError,
    "machine": UsageError,
    "user": JobFailed,
    "unknown": JobFailed,
    "expired": JobFailed,
    "cancelled": JobFailed,
    "permission": NotAuthorised,
    "credentials": NotAuthorised,
    "project": NotAuthorised,
    "quota": NoCapacity,
    "stockout": NoCapacity,
    "waited": NoCapacity,
    "preempted": NoCapacity,
}


def error_of(diagnosis: Diagnosis) -> type[LaunchError]:
    """Return the class of the error, with its exit code, of a run that ends with this diagnosis."""
    return ERRORS.get(diagnosis.kind, LaunchError)

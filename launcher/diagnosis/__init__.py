"""Diagnose refusals by Google's APIs and the ends of jobs: scope, cause and fix. Pure.

The patterns match messages seen in answers of Vertex AI and Compute Engine. An unknown message is reported verbatim and
classified by its status.
"""

from __future__ import annotations

from launcher.diagnosis.api_error import diagnose_refusal
from launcher.diagnosis.job_end import diagnose_end
from launcher.diagnosis.model import Diagnosis, Kind, Refusal, RequestContext, Scope

__all__ = ["Diagnosis", "Kind", "Refusal", "RequestContext", "Scope", "diagnose_end", "diagnose_refusal", "exit_code"]

EXIT_CODES: dict[Kind, int] = {
    "succeeded": 0,
    "invalid": 2,
    "machine": 2,
    "user": 3,
    "unknown": 3,
    "expired": 3,
    "cancelled": 3,
    "permission": 4,
    "credentials": 4,
    "project": 4,
    "quota": 5,
    "stockout": 5,
    "waited": 5,
    "preempted": 5,
}


def exit_code(diagnosis: Diagnosis) -> int:
    """launch's exit code for a run that ends with this diagnosis (see launcher.errors); 1 is launch's own failure."""
    return EXIT_CODES.get(diagnosis.kind, 1)

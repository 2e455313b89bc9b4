"""Diagnose the end of a training VM whose container reported nothing, or never started."""

from __future__ import annotations

import re
from typing import Final

from launcher.diagnosis.api_error import LONGEST, diagnose_by_rules, diagnose_refusal
from launcher.diagnosis.model import Diagnosis, Refusal, RequestContext, Scope
from launcher.diagnosis.text import plain
from launcher.jobs.job import Failure, Job

PREEMPTED: Final = "preempted"
HOST_ERROR: Final = "hostError"
MAINTENANCE: Final = "maintenance"
STOPPED: Final = "stopped"
STARTUP: Final = "startup"
"""Values of a Failure's reason: the VM was preempted; its host failed; its host went down for maintenance (a VM with
GPUs can't move to another); the VM was stopped; its startup script failed before the container started."""

TAKEN: Final = {
    PREEMPTED: "the VM was preempted before a checkpoint was saved",
    HOST_ERROR: "the VM's host failed",
    MAINTENANCE: "the VM was stopped for host maintenance",
    STOPPED: "the VM was stopped before its container exited",
}
HTTP: Final = {
    1: 499,
    3: 400,
    4: 504,
    5: 404,
    6: 409,
    7: 403,
    8: 429,
    9: 400,
    10: 409,
    11: 400,
    12: 501,
    13: 500,
    14: 503,
}
"""google.rpc.Code -> HTTP's status (google/rpc/code.proto). 16, UNAUTHENTICATED, is left out: the job's own
credentials aren't those of who asks."""
DRIVER: Final = r"nvidia|driver|\bGPU"
PULL: Final = r"can't be pulled"
"""Of the startup script's own words: the GPU does not come up; the image does not come."""


def diagnose_vm_end(job: Job, context: RequestContext, log: str) -> Diagnosis | None:
    """Diagnose a VM that ended by itself or was never created; None: the container's exit code tells more."""
    error = job.error
    if job.zone is None or error is None:
        return None
    if error.reason in TAKEN:
        return Diagnosis(scope="transient", kind="preempted", cause=TAKEN[error.reason], fix=log)
    if error.reason == STARTUP:
        return diagnose_startup(error, context, log)
    return diagnose_refusal(refusal_of(error), context) if error.reason else None


def refusal_of(error: Failure) -> Refusal:
    """Convert the error of an operation to the refusal that an immediate answer would have been."""
    return Refusal(
        code=HTTP.get(error.code, 500),
        message=error.message,
        reason=error.reason,
        metadata=error.metadata,
        service="compute",
    )


def diagnose_startup(error: Failure, context: RequestContext, log: str) -> Diagnosis:
    """Diagnose a startup script that could not start the container, from its error message."""
    message = (error.metadata.get("reason", "") or error.message)[:LONGEST]
    known = diagnose_by_rules(Refusal(code=400, message=message, service="compute"), context)
    if known is not None and known.kind in ("permission", "image", "disabled", "credentials"):
        return known
    if re.search(PULL, message, re.IGNORECASE):  # by no fault of the image's: the way to it, then
        fix = f"gcloud compute routers list --project={context.project} shows whether {context.region} has a Cloud NAT"
        return Diagnosis(scope="region", kind="image", cause=plain(message), fix=fix)
    scope: Scope = "zone" if re.search(DRIVER, message, re.IGNORECASE) else "permanent"
    return Diagnosis(scope=scope, kind="unfit", cause=f"the VM could not run the job: {plain(message)}", fix=log)

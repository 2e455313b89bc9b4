"""Diagnose the end of a job: by its state, the exit codes of its replicas, its error, or how its VM ended."""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from launch_train.common.contract import Exit
from launcher.diagnosis.api_error import LONGEST, diagnose_by_rules, diagnose_refusal
from launcher.diagnosis.capacity import stockout
from launcher.diagnosis.model import Diagnosis, Kind, Refusal, RequestContext, Scope, first, plain
from launcher.diagnosis.permissions import project_number
from launcher.jobs.job import GONE, Failure, Job

TIMED_OUT, EXHAUSTED, OWN_FAULTS = 4, 8, (13, 14, 15)
"""google.rpc.Code: DEADLINE_EXCEEDED; RESOURCE_EXHAUSTED; and the service's own failures INTERNAL, UNAVAILABLE and
DATA_LOSS."""


def diagnose_end(job: Job, context: RequestContext, last_error: str = "") -> Diagnosis:
    """Return the diagnosis of an ended job. `last_error` is the last error in its log, if known."""
    log = f"launch logs {job.handle}"
    match job.state:
        case "SUCCEEDED":
            return Diagnosis(scope="permanent", kind="succeeded", cause="done")
        case "EXPIRED":
            return diagnose_expired(job, context)
        case "CANCELLED" | "FAILED":
            return diagnose_error(job, context, plain(last_error), log)
        case "PARTIALLY_SUCCEEDED":
            cause = f"only part of the job succeeded{its_words(job)}"
            return Diagnosis(scope="permanent", kind="unknown", cause=cause, fix=log)
        case state if state == GONE:
            return Diagnosis(
                scope="permanent",
                kind="cancelled",
                cause=f"the {'VM' if job.zone else 'job'} was deleted",
                fix=resume_fix(job),
            )
    cause, fix = f"it ended as {job.state}{its_words(job)}", log
    if job.state == "INTERRUPTED":
        cause = "it was stopped" if job.ended else "its process ended without recording how"
        fix = resume_fix(job)
    if job.is_here and job.error:
        cause, fix = plain(job.error.message), f"restore that file, or delete the run: launch rm {job.handle}"
    return Diagnosis(scope="permanent", kind="unknown", cause=cause, fix=fix)


def diagnose_expired(job: Job, context: RequestContext) -> Diagnosis:
    """Diagnose an expired job: its time limit, or flex-start's wait for machines."""
    if job.started is None and context.provisioning == "flex-start":
        return stockout(context)
    cause, fix = "the time limit (limits.hours) was reached", f"{resume_fix(job)} --hours HOURS"
    return Diagnosis(scope="permanent", kind="expired", cause=cause, fix=fix)


def diagnose_error(job: Job, context: RequestContext, last_error: str, log: str) -> Diagnosis:
    text = job.error.message if job.error else ""
    if job.state == "FAILED" and (of_machine := diagnose_vm_end(job, context, log)):
        return of_machine
    exits = exit_codes(text) if job.state == "FAILED" else []  # a cancelled job's exit code is due to that
    if exits:
        return diagnose_exit_codes(job, exits, text, last_error, log)
    if known := diagnose_message(job, context):
        return known
    if job.state == "CANCELLED":
        return Diagnosis(scope="permanent", kind="cancelled", cause="it was cancelled", fix=resume_fix(job))
    return diagnose_error_code(job, context, last_error, log)


def diagnose_error_code(job: Job, context: RequestContext, last_error: str, log: str) -> Diagnosis:
    code = job.error.code if job.error else 0
    if code == EXHAUSTED:
        return stockout(context)
    if code == TIMED_OUT:
        return diagnose_expired(job, context)
    if code in OWN_FAULTS:
        service = "Compute Engine" if job.zone else "Vertex AI"
        cause = its_words(job)[2:] if job.target == "on" else f"{service} failed to run the job{its_words(job)}"
        return Diagnosis(scope="transient", kind="busy", cause=cause, fix=log)
    tail = f"; its last error: {last_error}" if last_error else ""
    return Diagnosis(scope="permanent", kind="unknown", cause=f"it failed{its_words(job)}{tail}", fix=log)


def diagnose_message(job: Job, context: RequestContext) -> Diagnosis | None:
    """Diagnose an error about quotas, placements, images or permissions; None if it is about none of them."""
    if job.error is None:
        return None
    diagnosis = diagnose_by_rules(
        Refusal(code=HTTP.get(job.error.code, 400), message=job.error.message[:LONGEST]), context
    )
    if diagnosis is None or diagnosis.kind == "busy":
        return None
    known = first(r"^projects/(\d+)/", job.name)
    return replace(diagnosis, fix=diagnosis.fix.replace(project_number(context), known)) if known else diagnosis


def its_words(job: Job) -> str:
    """Return `: ` and the message of the job's error; empty if there is none."""
    text = plain(job.error.message) if job.error else ""
    return f": {text}" if text else ""


def resume_fix(job: Job) -> str:
    """Suggest how to resume a run that has ended."""
    return f"To resume, from its newest checkpoint if it has one: {resumed(job)}"


def resumed(job: Job) -> str:
    """Return the command that resumes the run, on the same service."""
    return f"{job.command} --resume {job.handle if job.is_here else job.run or 'RUN'}"


# --- Exit codes of the replicas ---------------------------------------------------------------------------------------

EXITED = r"replica\b\s*([\w-]+(?: \d+)?)?[^.]{0,40}?exited with a non-zero status(?: code)?(?: of)? (-?\d{1,10})"
MEMORY = r"out.of.memory|OOMKilled|low on memory"
SIGNALS = {2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
"""Linux's signal numbers (signal(7)), as in the containers. A shell adds 128."""
INTERRUPTED = (128 + 15, 128 + 2)


def exit_codes(text: str) -> list[tuple[str, int]]:
    """Return (replica, exit code), the most specific first: signals often only show how the others were stopped."""
    codes = [(who or "a replica", int(code)) for who, code in re.findall(EXITED, text, re.IGNORECASE)]
    return sorted(codes, key=lambda one: TELLING.index(one[1]) if one[1] in TELLING else 50 + (not 0 < one[1] < 128))


TELLING = (Exit.SUPERSEDED, Exit.USAGE, Exit.DISAGREED, Exit.TERMINAL, Exit.PREEMPTED, Exit.UNFIT)
MEANINGS: dict[int, tuple[Scope, Kind, str]] = {
    Exit.FAILED: ("permanent", "user", "it failed more often than limits.restarts allows"),
    Exit.USAGE: ("permanent", "user", "invalid config or code"),
    Exit.UNFIT: ("region+provisioning", "unfit", "the machine was unfit, or the output could not be written"),
    Exit.PREEMPTED: ("transient", "preempted", "the machines were preempted; the checkpoint was saved"),
    Exit.DISAGREED: ("permanent", "user", "the ranks' parameters differ: do not trust the result"),
    Exit.SUPERSEDED: ("permanent", "lost", "another start of the run has taken over"),
    Exit.TERMINAL: ("permanent", "user", "the run folder is marked as permanently failed"),
}
"""contract.Exit -> its diagnosis."""


def diagnose_exit_codes(job: Job, exits: list[tuple[str, int]], text: str, last_error: str, log: str) -> Diagnosis:
    who, code = exits[0]
    if code == Exit.UNFIT and (grant := first(r"(gcloud .*add-iam-policy-binding .*?--role=[\w/.]+)", last_error)):
        return Diagnosis(
            scope="permanent", kind="permission", cause=last_error.split(": gcloud ", maxsplit=1)[0], fix=grant
        )
    scope, kind, words = meaning(code, text)
    if code == Exit.UNFIT and re.search(r"\bsecret \w+ \(", last_error):  # no other machine could read it either
        return Diagnosis(scope="permanent", kind=kind, cause=plain(last_error))
    cause = f"{who} exited with {code}: {words}" + (f"; its last error: {last_error}" if last_error else "")
    fix = f"After fixing the cause: {resumed(job)}" if code == Exit.TERMINAL else log
    return Diagnosis(scope=scope, kind=kind, cause=cause, fix=fix)


def meaning(code: int, text: str) -> tuple[Scope, Kind, str]:
    """Diagnose an exit code: one of launch_train.node's, otherwise a shell's (128 + the signal)."""
    if re.search(MEMORY, text, re.IGNORECASE):
        return "permanent", "user", "it ran out of host memory"
    if code in MEANINGS:
        return MEANINGS[code]
    if code in INTERRUPTED:
        return "transient", "preempted", "it was interrupted before it could save a checkpoint"
    if code == 128 + 9:
        return "permanent", "user", "it was killed, most likely because the machine ran out of memory"
    name = SIGNALS.get(code - 128 if code > 128 else -code)
    return "permanent", "user", f"it was killed by {name}" if name else "the program failed"


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
HTTP: Final = {1: 499, 3: 400, 4: 504, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 11: 400, 12: 501, 13: 500,
               14: 503}  # fmt: skip
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
    if not error.reason:
        return None
    code = HTTP.get(error.code, 500)
    refusal = Refusal(code=code, message=error.message, reason=error.reason, metadata=error.metadata, service="compute")
    return diagnose_refusal(refusal, context)  # as an immediate answer would have been


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

"""What the end of a job means: by its state, the exit codes of its replicas, or its own error."""

from __future__ import annotations

import re

from msgspec.structs import replace

from launch_train.common.contract import Exit
from launcher.diagnosis.api_error import LONGEST, recognised
from launcher.diagnosis.capacity import stockout
from launcher.diagnosis.model import Diagnosis, Kind, Refusal, Scope, Tried
from launcher.diagnosis.permissions import number
from launcher.diagnosis.text import first, plain
from launcher.diagnosis.vm_end import HTTP, of_vm
from launcher.jobs.job import GONE, Job, command

TIMED_OUT, EXHAUSTED, OWN_FAULTS = 4, 8, (13, 14, 15)
"""google.rpc.Code: time, machines or quota are over; INTERNAL, UNAVAILABLE and DATA_LOSS are the service's own."""


def of_end(job: Job, tried: Tried, said: str = "") -> Diagnosis:
    """What an ended job means. `said` is the last error in its log, as far as it is known."""
    log = f"launch logs {job.handle}"
    match job.state:
        case "SUCCEEDED":
            return Diagnosis(scope="permanent", kind="succeeded", cause="done")
        case "EXPIRED":
            return of_expired(job, tried)
        case "CANCELLED" | "FAILED":
            return of_error(job, tried, plain(said), log)
        case "PARTIALLY_SUCCEEDED":
            cause = f"only a part of the job succeeded{its_words(job)}"
            return Diagnosis(scope="permanent", kind="unknown", cause=cause, fix=log)
        case state if state == GONE:
            return Diagnosis(
                scope="permanent",
                kind="cancelled",
                cause=f"somebody deleted the {'VM' if job.zone else 'job'}",
                fix=again(job),
            )
    return Diagnosis(scope="permanent", kind="unknown", cause=f"it ended as {job.state}{its_words(job)}", fix=log)


def of_expired(job: Job, tried: Tried) -> Diagnosis:
    """Its time was over: of its work, or of flex-start's wait for machines."""
    if job.started is None and tried.provisioning == "flex-start":
        return stockout(tried)
    fix = f"Give it more: --hours, and {resumed(job)} goes on from its checkpoint"
    return Diagnosis(scope="permanent", kind="expired", cause="limits.hours are over", fix=fix)


def of_error(job: Job, tried: Tried, said: str, log: str) -> Diagnosis:
    """A job that failed, or was cancelled."""
    text = job.error.message if job.error else ""
    if job.state == "FAILED" and (of_machine := of_vm(job, tried, log)):
        return of_machine
    exits = exit_codes(text) if job.state == "FAILED" else []  # who was cancelled died of that, whatever its code
    if exits:
        return of_exit(job, exits, text, said, log)
    if known := of_words(job, tried):
        return known
    if job.state == "CANCELLED":
        return Diagnosis(scope="permanent", kind="cancelled", cause="it was cancelled", fix=again(job))
    return of_code(job, tried, said, log)


def of_code(job: Job, tried: Tried, said: str, log: str) -> Diagnosis:
    """By its error's code alone."""
    code = job.error.code if job.error else 0
    if code == EXHAUSTED:
        return stockout(tried)
    if code == TIMED_OUT:
        return of_expired(job, tried)
    if code in OWN_FAULTS:
        who = "Compute Engine" if job.zone else "Vertex AI"
        return Diagnosis(scope="transient", kind="busy", cause=f"{who} gave the job up{its_words(job)}", fix=log)
    tail = f"; its last error: {said}" if said else ""
    return Diagnosis(scope="permanent", kind="unknown", cause=f"it failed{its_words(job)}{tail}", fix=log)


def of_words(job: Job, tried: Tried) -> Diagnosis | None:
    """What the job's error says of quotas, places, images and permissions; None if it is about none of them."""
    if job.error is None:
        return None
    found = recognised(Refusal(code=HTTP.get(job.error.code, 400), message=job.error.message[:LONGEST]), tried)
    if found is None or found.kind == "busy":
        return None
    known = first(r"^projects/(\d+)/", job.name)
    return replace(found, fix=found.fix.replace(number(tried), known)) if known else found


def its_words(job: Job) -> str:
    """`: ` and what the job's error says, if it says anything."""
    text = plain(job.error.message) if job.error else ""
    return f": {text}" if text else ""


def again(job: Job) -> str:
    """How a run that was ended by hand goes on."""
    return f"{resumed(job)} goes on from its last checkpoint"


def resumed(job: Job) -> str:
    """The command that resumes its run, on the same service."""
    return f"{command(vm=job.zone is not None)} --resume {job.run or 'RUN'}"


# --- What the replicas exited with ------------------------------------------------------------------------------------

EXITED = r"replica\b\s*([\w-]+(?: \d+)?)?[^.]{0,40}?exited with a non-zero status(?: code)?(?: of)? (-?\d{1,10})"
MEMORY = r"out.of.memory|OOMKilled|low on memory"
SIGNALS = {2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
"""Linux's numbers (signal(7)): the containers' system, wherever this runs. A shell says 128 more."""
STOPPED = (128 + 15, 128 + 2)


def exit_codes(text: str) -> list[tuple[str, int]]:
    """Replica and exit code, the most telling first: signals are often only how the others were stopped."""
    found = [(who or "a replica", int(code)) for who, code in re.findall(EXITED, text, re.IGNORECASE)]
    return sorted(found, key=lambda one: TELLING.index(one[1]) if one[1] in TELLING else 50 + (not 0 < one[1] < 128))


TELLING = (Exit.SUPERSEDED, Exit.USAGE, Exit.DISAGREED, Exit.TERMINAL, Exit.PREEMPTED, Exit.UNFIT)
MEANINGS: dict[int, tuple[Scope, Kind, str]] = {
    Exit.FAILED: ("permanent", "user", "it failed more often than limits.restarts allows"),
    Exit.USAGE: ("permanent", "user", "its config or its code can't work"),
    Exit.UNFIT: ("region+provisioning", "unfit", "the machine wasn't fit, or its output couldn't be written"),
    Exit.PREEMPTED: ("transient", "preempted", "the machines were taken away, after all was saved"),
    Exit.DISAGREED: ("permanent", "user", "the ranks' parameters differ: its result must not be trusted"),
    Exit.SUPERSEDED: ("permanent", "lost", "another start of the run has taken it over"),
    Exit.TERMINAL: ("permanent", "user", "the run folder says that it must not be started again"),
}
"""contract.Exit -> what it means for the run."""


def of_exit(job: Job, exits: list[tuple[str, int]], text: str, said: str, log: str) -> Diagnosis:
    """A replica that exited by itself, or was killed."""
    who, code = exits[0]
    if code == Exit.UNFIT and (grant := first(r"(gcloud .*add-iam-policy-binding .*?--role=[\w/.]+)", said)):
        return Diagnosis(scope="permanent", kind="permission", cause=said.split(": gcloud ", maxsplit=1)[0], fix=grant)
    scope, kind, words = meaning(code, text)
    if code == Exit.UNFIT and re.search(r"\bsecret \w+ \(", said):  # no other machine could read it either
        return Diagnosis(scope="permanent", kind=kind, cause=plain(said))
    cause = f"{who} exited with {code}: {words}" + (f"; its last error: {said}" if said else "")
    return Diagnosis(scope=scope, kind=kind, cause=cause, fix=advice(job, code, log))


def meaning(code: int, text: str) -> tuple[Scope, Kind, str]:
    """What a container's exit code says: by launch_train.node's own, then as a shell reads it (128 + the signal)."""
    if re.search(MEMORY, text, re.IGNORECASE):
        return "permanent", "user", "it ran out of the machine's memory"
    if code in MEANINGS:
        return MEANINGS[code]
    if code in STOPPED:
        return "transient", "preempted", "it was stopped from outside before it could save"
    if code == 128 + 9:
        return "permanent", "user", "it was killed: most likely it ran out of the machine's memory"
    name = SIGNALS.get(code - 128 if code > 128 else -code)
    return "permanent", "user", f"it was killed by {name}" if name else "its own failure"


def advice(job: Job, code: int, log: str) -> str:
    """What to do about it."""
    if code == Exit.TERMINAL:
        return f"Once its cause is gone: {resumed(job)}"
    return log

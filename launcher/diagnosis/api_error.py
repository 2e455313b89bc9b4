"""Diagnose a refusal by an API: ordered rules, the most specific first, each for some messages."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from launcher.diagnosis.capacity import diagnose_machine, diagnose_stockout
from launcher.diagnosis.model import Diagnosis, Refusal, RequestContext, first, plain
from launcher.diagnosis.permissions import diagnose_access
from launcher.diagnosis.quota import diagnose_quota

LONGEST = 20_000
"""Maximum characters of a message that are searched."""
BUSY = frozenset({"RATE_LIMIT_EXCEEDED", "rateLimitExceeded", "userRateLimitExceeded"})
TRANSIENT_CODES = frozenset({408, 429, 499})
"""Besides 5xx: status codes after which the same request may work."""


def diagnose_refusal(refusal: Refusal, context: RequestContext) -> Diagnosis:
    """Return the diagnosis of a refusal; any message gives one."""
    fit = {key: value for key, value in refusal.metadata.items() if re.fullmatch(r"[\w.:/@,-]{1,300}", value)}
    refusal = replace(refusal, message=refusal.message[:LONGEST], metadata=fit)  # it goes into commands
    return diagnose_by_rules(refusal, context) or diagnose_by_status(refusal)


def diagnose_by_rules(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Return the diagnosis of the first matching rule, or None."""
    rules: tuple[Callable[[Refusal, RequestContext], Diagnosis | None], ...] = (
        *(diagnose_quota, diagnose_rate, diagnose_stockout, diagnose_machine, diagnose_disk),
        *(diagnose_image, diagnose_output, diagnose_access, diagnose_request),
    )
    return next(filter(None, (rule(refusal, context) for rule in rules)), None)


def diagnose_by_status(refusal: Refusal) -> Diagnosis:
    """Diagnose by the status alone; the cause is Google's message."""
    message = refusal_text(refusal)
    if refusal.code in TRANSIENT_CODES or refusal.code >= 500:
        return busy(refusal, message)
    if refusal.code == 403:
        return Diagnosis(scope="permanent", kind="permission", cause=message)
    return Diagnosis(scope="permanent", kind="invalid" if 400 <= refusal.code < 500 else "unknown", cause=message)


def refusal_text(refusal: Refusal) -> str:
    """Return Google's message."""
    return plain(refusal.message) or f"HTTP {refusal.code} without a message"


def busy(refusal: Refusal, message: str) -> Diagnosis:
    fix = "Try again in a moment."
    return Diagnosis(scope="transient", kind="busy", cause=message, fix=fix, retry_after=max(0.0, refusal.retry_after))


def diagnose_rate(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose too many requests, which Compute Engine answers with 403."""
    if refusal.reason in BUSY or re.search(r"per (minute|second)|rate.?limit", refusal.message, re.IGNORECASE):
        return busy(refusal, refusal_text(refusal))
    return None


def diagnose_disk(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a disk that another VM still writes to, such as the VM of the previous attempt while it is deleted."""
    if not re.search(r"disk resource '\S+' is already being used by", refusal.message):
        return None
    fix = f"gcloud compute instances list --project={context.project} shows the VM"
    return Diagnosis(scope="transient", kind="busy", cause=refusal_text(refusal), fix=fix, retry_after=DISK_WAIT)


DISK_WAIT = 30.0
"""Seconds."""


IMAGE = (
    r"manifest unknown|failed to pull|unable to pull|ErrImagePull|ImagePullBackOff"
    r"|image .{1,300}(?:not found|not exist)"
)


def diagnose_image(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a missing image; an unreadable one is a missing permission."""
    if "ermission" in refusal.message or not re.search(IMAGE, refusal.message, re.IGNORECASE):
        return None
    image = context.image or "IMAGE"
    cause = f"cannot pull the image {image}: {plain(refusal.message)}"
    return Diagnosis(
        scope="permanent", kind="image", cause=cause, fix=f"gcloud artifacts docker images describe {image}"
    )


def diagnose_output(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a missing bucket."""
    text = refusal.message
    if not re.search(r"bucket.{0,200} (?:does not exist|not found)", text, re.IGNORECASE):
        return None
    bucket = first(r"gs://([\w.-]*\w)", text) or first(r"gs://([\w.-]*\w)", context.output) or "BUCKET"
    fix = f"gcloud storage buckets create gs://{bucket} --location={context.region} --project={context.project}"
    return Diagnosis(scope="project", kind="output", cause=f"the bucket {bucket} does not exist", fix=fix)


def diagnose_request(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose an invalid request: Vertex AI's list of invalid fields, or a name that exists already."""
    text = refusal.message
    if refusal.reason in ("alreadyExists", "RESOURCE_ALREADY_EXISTS"):
        return Diagnosis(scope="permanent", kind="invalid", cause=refusal_text(refusal), fix="Use another --name")
    fields = re.findall(r"\d+\.\s?Field: (\S+); Message: (.*?)\s*(?=\d+\.\s?Field:|\Z)", text, re.DOTALL)
    if not fields:
        return None
    cause = "; ".join(f"{field}: {message}" for field, message in fields)
    return Diagnosis(
        scope="permanent", kind="invalid", cause=plain(f"Vertex AI refuses the request: {cause}"), fix=SHOW
    )


SHOW = "Show the request: launch vertex SPEC --dry-run -o yaml"

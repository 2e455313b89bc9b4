"""What a refusal means: rules from the most telling to the least, each of which knows some wordings."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from launcher.diagnosis.capacity import of_machine, of_stockout
from launcher.diagnosis.model import Diagnosis, Refusal, Tried
from launcher.diagnosis.permissions import of_access
from launcher.diagnosis.quota import of_quota
from launcher.diagnosis.text import first, plain

LONGEST = 20_000
"""Characters of a message that are read."""
BUSY = frozenset({"RATE_LIMIT_EXCEEDED", "rateLimitExceeded", "userRateLimitExceeded"})
PASSING = frozenset({408, 429, 499})
"""Besides 5xx: status codes after which the same request may work."""


def of_refusal(refusal: Refusal, tried: Tried) -> Diagnosis:
    """How far a refusal reaches, why it came and what to do; any text gives a diagnosis."""
    fit = {key: value for key, value in refusal.metadata.items() if re.fullmatch(r"[\w.:/@,-]{1,300}", value)}
    refusal = replace(refusal, message=refusal.message[:LONGEST], metadata=fit)  # it goes into commands
    return recognised(refusal, tried) or unknown(refusal)


def recognised(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """The diagnosis of the first rule that knows the wording; None if none does."""
    rules: tuple[Callable[[Refusal, Tried], Diagnosis | None], ...] = (
        *(of_quota, of_rate, of_stockout, of_machine, of_image, of_output, of_access, of_request),
    )
    return next(filter(None, (rule(refusal, tried) for rule in rules)), None)


def unknown(refusal: Refusal) -> Diagnosis:
    """By its status alone, in Google's own words."""
    said = spoken(refusal)
    if refusal.code in PASSING or refusal.code >= 500:
        return busy(refusal, said)
    if refusal.code == 403:
        return Diagnosis(scope="permanent", kind="permission", cause=said)
    return Diagnosis(scope="permanent", kind="invalid" if 400 <= refusal.code < 500 else "unknown", cause=said)


def spoken(refusal: Refusal) -> str:
    """What Google said."""
    return plain(refusal.message) or f"HTTP {refusal.code}, without a word"


def busy(refusal: Refusal, said: str) -> Diagnosis:
    """It may work in a moment."""
    fix = "Try again in a moment"
    return Diagnosis(scope="transient", kind="busy", cause=said, fix=fix, retry_after=max(0.0, refusal.retry_after))


def of_rate(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """Too many requests, which Compute Engine answers with 403."""
    if refusal.reason in BUSY or re.search(r"per (minute|second)|rate.?limit", refusal.message, re.IGNORECASE):
        return busy(refusal, spoken(refusal))
    return None


IMAGE = (
    r"manifest unknown|failed to pull|unable to pull|ErrImagePull|ImagePullBackOff"
    r"|image .{1,300}(?:not found|not exist)"
)


def of_image(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """An image that isn't there. One that may not be read is a permission's business."""
    if "ermission" in refusal.message or not re.search(IMAGE, refusal.message, re.IGNORECASE):
        return None
    image = tried.image or "IMAGE"
    cause = f"the image {image} can't be pulled: {plain(refusal.message)}"
    return Diagnosis(
        scope="permanent", kind="image", cause=cause, fix=f"gcloud artifacts docker images describe {image}"
    )


def of_output(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """A bucket that isn't there."""
    text = refusal.message
    if not re.search(r"bucket.{0,200} (?:does not exist|not found)", text, re.IGNORECASE):
        return None
    bucket = first(r"gs://([\w.-]*\w)", text) or first(r"gs://([\w.-]*\w)", tried.output) or "BUCKET"
    fix = f"gcloud storage buckets create gs://{bucket} --location={tried.region} --project={tried.project}"
    return Diagnosis(scope="project", kind="output", cause=f"there is no bucket {bucket}", fix=fix)


def of_request(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """A request that names something wrong: Vertex AI's list of it, or a name that is taken."""
    text = refusal.message
    if refusal.reason in ("alreadyExists", "RESOURCE_ALREADY_EXISTS"):
        return Diagnosis(scope="permanent", kind="invalid", cause=spoken(refusal), fix="Take another --name")
    found = re.findall(r"\d+\.\s?Field: (\S+); Message: (.*?)\s*(?=\d+\.\s?Field:|\Z)", text, re.DOTALL)
    if not found:
        return None
    cause = "; ".join(f"{field}: {said}" for field, said in found)
    return Diagnosis(scope="permanent", kind="invalid", cause=plain(f"Vertex AI refuses {cause}"), fix=SHOW)


SHOW = "launch vertex SPEC --dry-run -o yaml shows the request"

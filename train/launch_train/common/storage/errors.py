"""What Cloud Storage's errors mean: which pass by themselves, and what to do about the others."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

from launch_train.common.errors import OutputError


class TornError(Exception):
    """An object or an answer was damaged or lost on its way; the next try may do better."""


PASSING = (408, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work (https://cloud.google.com/storage/docs/retry-strategy)."""


def may_pass(error: Exception) -> bool:
    """Whether the same request may work a moment later."""
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption
    from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema, RequestException
    from urllib3.exceptions import HTTPError

    if status := _status(error):
        return status in PASSING
    if isinstance(error, (InvalidURL, InvalidSchema, MissingSchema)):
        return False
    if isinstance(error, RefreshError):
        return bool(error.retryable)
    broken = (TornError, DataCorruption, TransportError, RequestException, HTTPError, http.client.HTTPException)
    return isinstance(error, (*broken, ConnectionError, TimeoutError))


def _status(error: Exception) -> int:
    """HTTP's status, of an error that Google's client made of one; else 0."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, GoogleAPICallError):
        return int(error.code or 0)
    if isinstance(error, InvalidResponse):
        return int(error.response.status_code)
    return 0


def retry_after(error: Exception) -> float:
    """Seconds that the service asks to wait (its Retry-After); 0 if it doesn't say, or says a date."""
    response = getattr(error, "response", None)
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0


def is_damage(error: Exception) -> bool:
    """Whether the service refused an upload because its checksum is not that of what arrived."""
    return _status(error) == 400 and "calculated" in said(error)


def is_missing_bucket(error: Exception) -> bool:
    """Whether a 404 is about the bucket rather than an object in it."""
    return _status(error) == 404 and "bucket does not exist" in said(error)


def is_off_track(error: Exception) -> bool:
    """Whether a resumable upload must begin anew: the service doesn't know it any more, or (308 that Google's client
    didn't take, ValueError) has kept a part of a chunk only, which the client can't go on from."""
    from google.auth.exceptions import GoogleAuthError

    lost = _status(error) in (308, 404, 410) and not is_missing_bucket(error)
    return lost or (isinstance(error, ValueError) and not isinstance(error, GoogleAuthError))


def said(error: BaseException) -> str:
    """The service's own words on one line, or the innermost cause's."""
    response = getattr(error, "response", None)
    text = _message(response) if response is not None else ""
    return " ".join((text or str(_innermost(error)) or type(error).__name__).split())


def _message(response: Any) -> str:
    """Of an answer: the message of its JSON, or its text, as far as it came."""
    try:
        text = str(response.text)
    except (OSError, RuntimeError):  # requests' errors are OSErrors; RuntimeError: it was read elsewhere
        return ""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _innermost(error: BaseException) -> BaseException:
    """requests wraps urllib3's errors, which wrap the socket's: that one says what happened."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((each for each in reversed(error.args) if isinstance(each, BaseException)), None)
        if inner is None:
            return error
        error = inner


def refusal(error: Exception, url: str, bucket: str) -> OutputError | None:
    """An error that doesn't pass, in words that say what to do; None if it isn't Cloud Storage's."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    if isinstance(error, GoogleAuthError) or _status(error) == 401:
        return OutputError(f"{url}: the credentials are not accepted ({said(error)}); {LOG_IN}")
    if _status(error) == 403:
        return OutputError(f"{url}: {_forbidden(said(error), bucket)}")
    if _status(error) == 404:
        return OutputError(
            f"{url}: there is no bucket {bucket}: gcloud storage buckets create gs://{bucket} --location=REGION"
        )
    if isinstance(error, (GoogleAPIError, RequestException)) or _status(error):
        return OutputError(f"{url}: Cloud Storage refuses: {said(error)}")
    return None


LOG_IN = "gcloud auth application-default login, or a service account that the machine runs as"

_PERMISSION = re.compile(r"(storage\.objects\.\w+)")
"""What roles/storage.objectUser holds (https://cloud.google.com/storage/docs/access-control/iam-roles)."""
_WHO = re.compile(r"^(\S+@\S+) does not have")


def _forbidden(text: str, bucket: str) -> str:
    """Which permission is missing, to whom, and the command that gives it; else the service's own words."""
    permission, who = _PERMISSION.search(text), _WHO.search(text)
    if not permission:
        return f"access is refused: {text}"
    member = _member(who[1]) if who else "MEMBER"
    return (
        f"{who[1] if who else 'the caller'} lacks the permission {permission[1]}: gcloud storage buckets "
        f"add-iam-policy-binding gs://{bucket} --member={member} --role=roles/storage.objectUser"
    )


def _member(email: str) -> str:
    """As IAM writes who it is."""
    kind = "serviceAccount" if email.endswith(".gserviceaccount.com") else "user"
    return f"{kind}:{email}"

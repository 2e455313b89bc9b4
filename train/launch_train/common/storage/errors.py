"""Interpret errors of Cloud Storage: which ones a retry may fix, and what to do about the others."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

from launch_train.common.errors import OutputError


class TornError(Exception):
    """An object or a response was damaged or lost in transit; a retry may work."""


RETRYABLE = (408, 429, 500, 502, 503, 504)
"""Status codes after which a retry may work (https://cloud.google.com/storage/docs/retry-strategy)."""


def is_retryable(error: Exception) -> bool:
    """Return whether a retry may work."""
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption
    from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema, RequestException
    from urllib3.exceptions import HTTPError

    if status := _status(error):
        return status in RETRYABLE
    if isinstance(error, (InvalidURL, InvalidSchema, MissingSchema)):
        return False
    if isinstance(error, RefreshError):
        return bool(error.retryable)
    broken = (TornError, DataCorruption, TransportError, RequestException, HTTPError, http.client.HTTPException)
    return isinstance(error, (*broken, ConnectionError, TimeoutError))


def _status(error: Exception) -> int:
    """Return the HTTP status of an error of Google's client, else 0."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, GoogleAPICallError):
        return int(error.code or 0)
    if isinstance(error, InvalidResponse):
        return int(error.response.status_code)
    return 0


def retry_after(error: Exception) -> float:
    """Return the seconds of the response's Retry-After; 0 if it has none, or a date."""
    response = getattr(error, "response", None)
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0


def is_damage(error: Exception) -> bool:
    """Return whether the service rejected an upload because its checksum doesn't match."""
    return _status(error) == 400 and "calculated" in error_text(error)


def is_missing_bucket(error: Exception) -> bool:
    """Return whether a 404 is about the bucket rather than an object in it."""
    return _status(error) == 404 and "bucket does not exist" in error_text(error)


def is_upload_lost(error: Exception) -> bool:
    """Return whether a resumable upload must be restarted: the service no longer knows it, or has kept only a part of a
    chunk (a 308 that Google's client rejects with ValueError), from which the client can't resume."""
    from google.auth.exceptions import GoogleAuthError

    lost = _status(error) in (308, 404, 410) and not is_missing_bucket(error)
    return lost or (isinstance(error, ValueError) and not isinstance(error, GoogleAuthError))


def error_text(error: BaseException) -> str:
    """Return the service's message on one line, or that of the innermost cause."""
    response = getattr(error, "response", None)
    text = _message(response) if response is not None else ""
    return " ".join((text or str(_innermost(error)) or type(error).__name__).split())


def _message(response: Any) -> str:
    """Return the message of a response: of its JSON, or its text as far as it arrived."""
    try:
        text = str(response.text)
    except (OSError, RuntimeError):  # requests' errors are OSErrors; RuntimeError: the content was already read
        return ""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _innermost(error: BaseException) -> BaseException:
    """Return the innermost error: requests wraps urllib3's errors, which wrap the socket's."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((each for each in reversed(error.args) if isinstance(each, BaseException)), None)
        if inner is None:
            return error
        error = inner


def explain_error(error: Exception, url: str, bucket: str) -> OutputError | None:
    """Return an error that a retry can't fix, with what to do; None if it isn't Cloud Storage's."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    if isinstance(error, GoogleAuthError) or _status(error) == 401:
        return OutputError(f"{url}: the credentials were rejected ({error_text(error)}): {LOG_IN}")
    if _status(error) == 403:
        return OutputError(f"{url}: {_forbidden(error_text(error), bucket)}")
    if _status(error) == 404:
        return OutputError(
            f"{url}: bucket {bucket} does not exist: gcloud storage buckets create gs://{bucket} --location=REGION"
        )
    if isinstance(error, (GoogleAPIError, RequestException)) or _status(error):
        return OutputError(f"{url}: Cloud Storage rejected the request: {error_text(error)}")
    return None


LOG_IN = "gcloud auth application-default login, or run the machine as a service account"

_PERMISSION = re.compile(r"(storage\.objects\.\w+)")
"""Permissions of roles/storage.objectUser (https://cloud.google.com/storage/docs/access-control/iam-roles)."""
_WHO = re.compile(r"^(\S+@\S+) does not have")


def _forbidden(text: str, bucket: str) -> str:
    """Return which permission who is missing, and the command that grants it; else the service's message."""
    permission, who = _PERMISSION.search(text), _WHO.search(text)
    if not permission:
        return f"access denied: {text}"
    member = "MEMBER"
    if who:
        member = f"{'serviceAccount' if who[1].endswith('.gserviceaccount.com') else 'user'}:{who[1]}"
    return (
        f"{who[1] if who else 'the caller'} lacks the permission {permission[1]}: gcloud storage buckets "
        f"add-iam-policy-binding gs://{bucket} --member={member} --role=roles/storage.objectUser"
    )

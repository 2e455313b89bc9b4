"""Retries of one call to Cloud Storage, and what its errors mean.

A call is retried with exponential backoff and full jitter, until its time is up.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeVar

from launch_train.common.backoff import Backoff
from launch_train.common.errors import OutputError, innermost_error

T = TypeVar("T")

LIMIT_SECONDS = 120.0
"""Time limit of one call, including waits; the default of Google's client."""

SILENCE_SECONDS = 30.0
"""Time limit of one request without a received byte."""

SHORTEST_SECONDS = 5.0
"""A request gets half of the remaining time, so that a stalled one leaves time for another, but at least this."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Bounds of the backoff in seconds: it doubles from the first to the second."""

TOO_LATE = 0.05
"""Remaining seconds that are not worth another attempt."""


class UnreachableError(OutputError):
    """The run folder was unreachable, or failed with retryable errors, until the time limit."""


class LostError(Exception):
    """A resumable upload was lost too often."""


class TornError(Exception):
    """An object or a response was damaged or lost in transit; a retry may work."""


class BudgetSpentError(Exception):
    """The time limit has passed; the cause is the error of the last attempt."""


@dataclass(frozen=True)
class RetryClock:
    """Clock and jitter. The random generator is separate: using the global one would change what a training run
    computes."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = Random().random


class RetryBudget:
    """The retries of one call. Called with a request, it returns one with retries, as Google's client wants its
    `retry`."""

    def __init__(self, seconds: float, world: RetryClock) -> None:
        self.seconds = seconds
        self.unsure = False
        """An attempt has failed that may have taken effect."""
        self._world = world
        self._until = world.clock() + seconds
        self._backoff = Backoff(FIRST_WAIT, LONGEST_WAIT)

    def left(self) -> float:
        return self._until - self._world.clock()

    def timeout(self) -> float:
        """Return the connect and read timeout of one request."""
        left = max(self.left(), 0.001)
        return min(SILENCE_SECONDS, max(left / 2, SHORTEST_SECONDS), left)

    def __call__(self, request: Callable[[], T]) -> Callable[[], T]:
        return partial(self.run, request)

    def run(self, request: Callable[[], T]) -> T:
        """Return the result of the first successful attempt. Raises BudgetSpentError, and errors that a retry can't
        fix."""
        while True:
            try:
                return request()
            except Exception as error:
                if not is_retryable(error):
                    raise
                self.unsure = True
                self._wait(error)

    def _wait(self, error: Exception) -> None:
        requested = _retry_after(error)
        wait = max(requested, min(self._world.random() * self._backoff.wait(), self.left() / 2))
        if self.left() - wait < TOO_LATE:
            raise BudgetSpentError(f"tried for {self.seconds:.3g} s") from error
        self._world.sleep(wait)


CURRENT: ContextVar[RetryBudget | None] = ContextVar("budget", default=None)
"""The current call of this thread, whose time limit the connection respects."""


# --- Errors -----------------------------------------------------------------------------------------------------------

RETRYABLE = (408, 429, 500, 502, 503, 504)
"""Status codes after which a retry may work (https://cloud.google.com/storage/docs/retry-strategy)."""


def is_retryable(error: Exception) -> bool:
    """Return whether a retry may work."""
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption
    from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema, RequestException
    from urllib3.exceptions import HTTPError

    if status := http_status(error):
        return status in RETRYABLE
    if isinstance(error, (InvalidURL, InvalidSchema, MissingSchema)):
        return False
    if isinstance(error, RefreshError):
        return bool(error.retryable)
    broken = (TornError, DataCorruption, TransportError, RequestException, HTTPError, http.client.HTTPException)
    return isinstance(error, (*broken, ConnectionError, TimeoutError))


def http_status(error: Exception) -> int:
    """Return the HTTP status of an error of Google's client, else 0."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, GoogleAPICallError):
        return int(error.code or 0)
    if isinstance(error, InvalidResponse):
        return int(error.response.status_code)
    return 0


def _retry_after(error: Exception) -> float:
    """Return the seconds of the response's Retry-After; 0 if it has none, or a date."""
    response = getattr(error, "response", None)
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0


def is_missing_bucket(error: Exception) -> bool:
    """Return whether a 404 is about the bucket rather than an object in it."""
    return http_status(error) == 404 and "bucket does not exist" in storage_error_text(error)


def is_upload_lost(error: Exception) -> bool:
    """Return whether a resumable upload must be restarted: the service no longer knows it, or has kept only a part of a
    chunk (a 308 that Google's client rejects with ValueError), from which the client can't resume."""
    from google.auth.exceptions import GoogleAuthError

    lost = http_status(error) in (308, 404, 410) and not is_missing_bucket(error)
    return lost or (isinstance(error, ValueError) and not isinstance(error, GoogleAuthError))


def storage_error_text(error: BaseException) -> str:
    """Return the service's message on one line, or that of the innermost cause."""
    response = getattr(error, "response", None)
    text = _response_message(response) if response is not None else ""
    return " ".join((text or str(innermost_error(error)) or type(error).__name__).split())


def _response_message(response: Any) -> str:
    """Return the message of a response: of its JSON, or its text as far as it arrived."""
    try:
        text = str(response.text)
    except (OSError, RuntimeError):  # requests' errors are OSErrors; RuntimeError: the content was already read
        return ""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def storage_error(error: Exception, url: str, bucket: str, *, may_be_missing: bool) -> Exception | None:
    """Return the error that Storage promises, with what to do; None for one that isn't Cloud Storage's."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    if isinstance(error, BudgetSpentError):
        return UnreachableError(f"{url} is unreachable, {error}: {storage_error_text(error.__cause__ or error)}")
    if isinstance(error, LostError):
        return OutputError(f"{url} could not be uploaded, {error}: {storage_error_text(error.__cause__ or error)}")
    if isinstance(error, PreconditionFailed):
        return FileExistsError(f"{url} exists, or has another version now")
    if isinstance(error, NotFound) and may_be_missing and not is_missing_bucket(error):
        return FileNotFoundError(f"{url} does not exist")
    return _explain_refusal(error, url, bucket)


def _explain_refusal(error: Exception, url: str, bucket: str) -> OutputError | None:
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    text = storage_error_text(error)
    if isinstance(error, GoogleAuthError) or http_status(error) == 401:
        return OutputError(f"{url}: the credentials were rejected ({text}): {LOG_IN}")
    if http_status(error) == 403:
        return OutputError(f"{url}: {_forbidden(text, bucket)}")
    if http_status(error) == 404:
        create = f"gcloud storage buckets create gs://{bucket} --location=REGION"
        return OutputError(f"{url}: bucket {bucket} does not exist: {create}")
    if isinstance(error, (GoogleAPIError, RequestException)) or http_status(error):
        return OutputError(f"{url}: Cloud Storage rejected the request: {text}")
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

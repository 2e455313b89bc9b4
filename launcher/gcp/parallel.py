"""Classify the outcome of create calls, and run several calls in parallel."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from launcher.diagnosis import Refusal
from launcher.diagnosis.api_error import BUSY
from launcher.diagnosis.model import CreateRefused
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import (
    Api,
    Service,
    UnreachableError,
    answer_behind,
    explain,
    older_reason,
    refusal_of,
    status_of,
    words,
)

T = TypeVar("T")


class TolerantApi(Api):
    """An API client that treats unreadable answers and rate limits (403 on Compute Engine) as transient errors."""

    def once(self, method: str, **request: Any) -> Any:
        """As Api.once."""
        try:
            return super().once(method, **request)
        except LaunchError as error:
            answer: Any = answer_behind(error)
            if status_of(error) == 403 and {older_reason(answer), str(answer.reason)} & BUSY:  # a rate limit
                raise UnreachableError(error.problem, "Try again in a moment.") from answer
            raise
        except Exception as error:
            if not is_torn(error):
                raise
            raise UnreachableError(f"{self.service.title}'s answer can't be read: {words(str(error))}") from error


def is_torn(error: BaseException) -> bool:
    """Return whether an answer could not be parsed."""
    from google.protobuf.json_format import Error

    return isinstance(error, Error | ValueError)


def of_create(error: BaseException, service: Service, project: str) -> BaseException:
    """Classify the error of a create request.

    Returns CreateRefused (nothing was created), UnreachableError (unknown), or the error itself if neither the API nor
    the network caused it.
    """
    from google.api_core.exceptions import GoogleAPICallError

    explained = explain(error, service, project) if isinstance(error, Exception) else None
    if isinstance(error, GoogleAPICallError) and is_refusal(int(error.code or 0)):
        return CreateRefused(explained.problem if explained else str(error), refusal_of(error, service))
    if isinstance(explained, NotAuthorised):  # no token was available, so nothing was sent
        return CreateRefused(explained.problem, Refusal(code=401, message=explained.problem, service=service.name))
    if explained is not None:
        return UnreachableError(explained.problem, explained.hint)
    return UnreachableError(f"{service.title}'s answer can't be read: {words(str(error))}") if is_torn(error) else error


def is_refusal(code: int) -> bool:
    """Return whether an HTTP status guarantees that nothing was created.

    A timeout (408), a closed request (499) and server errors give no such guarantee: the effect may have come first.
    """
    return 400 <= code < 500 and code not in (408, 499)


def together(calls: Mapping[str, Callable[[], T]], seconds: float | None = None) -> dict[str, T | LaunchError]:
    """Run calls in parallel and return each answer or LaunchError.

    Without a time limit, the first call runs in this thread. The others run in daemon threads, which do not delay the
    exit after Ctrl-C. `seconds`: time limit of all of them; a call without an answer by then has an UnreachableError.
    """
    answers: dict[str, T | Exception] = {}

    def answer(key: str, call: Callable[[], T]) -> None:
        try:
            answers[key] = call()
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            answers[key] = error

    items = [*calls.items()]
    here = items[:1] if seconds is None else []
    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in items[len(here) :]]
    for thread in threads:
        thread.start()
    for item in here:
        answer(*item)
    until = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        thread.join(None if until is None else max(0.0, until - time.monotonic()))
    late = UnreachableError(f"no answer within {seconds or 0:.0f} s", "Try again in a moment.")
    return {key: known(answers.get(key, late)) for key in calls}


def in_pool(calls: Sequence[Callable[[], None]], threads: int) -> None:
    """Run calls in at most so many daemon threads, and wait for all. Raises the first error that a call raises, when
    all others have ended."""
    left, errors = deque(calls), deque[Exception]()

    def work() -> None:
        while left:
            try:
                call = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                call()
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(calls)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def known(answer: T | Exception) -> T | LaunchError:
    """Return an answer or a LaunchError; raise any other error."""
    if isinstance(answer, Exception) and not isinstance(answer, LaunchError):
        raise answer
    return answer


def call_once(api: Api, method: str, seconds: float, **request: Any) -> Any:
    """Return the answer to an optional request, with a short timeout and no retries. Raises as `Api.once` does."""
    try:
        return getattr(api.client, method)(request=request, retry=None, timeout=seconds)
    except Exception as error:
        if (explained := explain(error, api.service, api.project)) is None:
            raise
        raise explained from error

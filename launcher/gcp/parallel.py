"""Classify the outcome of create calls, and run several calls in parallel."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from launcher.diagnosis import Refusal
from launcher.diagnosis.model import CreateRefused
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.gcp.api import Service, explain, is_torn, refusal_of, words

T = TypeVar("T")


def of_create(error: BaseException, service: Service, project: str) -> BaseException:
    """Classify the error of a create request.

    Returns CreateRefused (nothing was created), UnreachableError (unknown), or the error itself if neither the API nor
    the network caused it.
    """
    from google.api_core.exceptions import GoogleAPICallError

    explained = explain(error, service, project) if isinstance(error, Exception) else None
    if isinstance(error, GoogleAPICallError) and 400 <= int(error.code or 0) < 500 and error.code not in UNCERTAIN:
        return CreateRefused(explained.problem if explained else str(error), refusal_of(error, service))
    if isinstance(explained, NotAuthorised):  # no token was available, so nothing was sent
        return CreateRefused(explained.problem, Refusal(code=401, message=explained.problem, service=service.name))
    if explained is not None:
        return UnreachableError(explained.problem, explained.hint)
    return UnreachableError(f"{service.title}'s answer can't be read: {words(str(error))}") if is_torn(error) else error


UNCERTAIN = (408, 499)
"""A timeout and a closed request: as with server errors, the effect may have come first."""


def together(calls: Mapping[str, Callable[[], T]], seconds: float | None = None) -> dict[str, T | LaunchError]:
    """Run calls in parallel and return each answer or LaunchError.

    Without a time limit, the first call runs in this thread. The others run in daemon threads, which do not delay the
    exit after Ctrl-C. `seconds`: time limit of all of them; a call without an answer by then has an UnreachableError.
    """
    answers: dict[str, Any] = {}

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
    for error in answers.values():
        if isinstance(error, Exception) and not isinstance(error, LaunchError):
            raise error
    return {key: answers.get(key, late) for key in calls}


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

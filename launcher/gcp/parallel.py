"""What an API's answer says for sure, and several answers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from launcher.backend.base import CreateRefused
from launcher.diagnosis import Refusal
from launcher.diagnosis.api_error import BUSY
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


class Asking(Api):
    """The API, where an answer that can't be read is none, and too many requests are what passes: Compute Engine
    answers 403 to those."""

    def once(self, method: str, **request: Any) -> Any:
        """As Api.once."""
        try:
            return super().once(method, **request)
        except LaunchError as error:
            if not is_rate(error):
                raise
            raise UnreachableError(error.problem, "Try again in a moment.") from answer_behind(error)
        except Exception as error:
            if not is_torn(error):
                raise
            raise UnreachableError(f"{self.service.title}'s answer can't be read: {words(str(error))}") from error


def is_rate(error: LaunchError) -> bool:
    """Whether a refusal only says that there were too many requests."""
    answer: Any = answer_behind(error)
    return status_of(error) == 403 and bool({older_reason(answer), str(answer.reason)} & BUSY)


def is_torn(error: BaseException) -> bool:
    """Whether an error is one of reading an answer: not JSON, not text, or not what it should say."""
    from google.protobuf.json_format import Error

    return isinstance(error, Error | ValueError)


def of_create(error: BaseException, service: Service, project: str) -> BaseException:
    """What a create's error says about the resource: CreateRefused (there is none), UnreachableError (not known), or
    the error itself if it isn't the API's, the network's or an answer's."""
    from google.api_core.exceptions import GoogleAPICallError

    told = explain(error, service, project) if isinstance(error, Exception) else None
    if isinstance(error, GoogleAPICallError) and is_refusal(int(error.code or 0)):
        return CreateRefused(told.problem if told else str(error), refusal_of(error, service))
    if isinstance(told, NotAuthorised):  # no token could be had, so nothing was sent
        return CreateRefused(told.problem, Refusal(code=401, message=told.problem, service=service.name))
    if told is not None:
        return UnreachableError(told.problem, told.hint)
    return UnreachableError(f"{service.title}'s answer can't be read: {words(str(error))}") if is_torn(error) else error


def is_refusal(code: int) -> bool:
    """Whether HTTP's status says for sure that nothing was done: not a time-out (408), not a request that was broken
    off (499), and no fault of a server's, which may come after the effect."""
    return 400 <= code < 500 and code not in (408, 499)


def together(calls: Mapping[str, Callable[[], T]]) -> dict[str, T | LaunchError]:
    """What each call answers, or its LaunchError; all at once: the first one here, the others in threads that nobody
    waits for after Ctrl-C."""
    answers: dict[str, T | Exception] = {}

    def answer(key: str, call: Callable[[], T]) -> None:
        try:
            answers[key] = call()
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            answers[key] = error

    if not calls:
        return {}
    here, *others = calls.items()
    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in others]
    for thread in threads:
        thread.start()
    answer(*here)
    for thread in threads:
        thread.join()
    return {key: known(answers[key]) for key in calls}


def known(answer: T | Exception) -> T | LaunchError:
    """An answer or a LaunchError; raises any other error."""
    if isinstance(answer, Exception) and not isinstance(answer, LaunchError):
        raise answer
    return answer


def glance(api: Api, method: str, seconds: float, **request: Any) -> Any:
    """The answer to a request for something that is only good to know: once, and soon. Raises as `Api.once`."""
    try:
        return getattr(api.client, method)(request=request, retry=None, timeout=seconds)
    except Exception as error:
        if (told := explain(error, api.service, api.project)) is None:
            raise
        raise told from error

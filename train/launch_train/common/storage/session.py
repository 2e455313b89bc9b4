"""The HTTP session of Cloud Storage: every request respects the time limit of its call. Imports requests, so it is
imported late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import Timeout

from launch_train.common.storage.retry import CURRENT, RetryBudget

BLOCK = 1 << 20
"""Bytes of a body between two checks of the time."""


class TimeLimitAdapter(HTTPAdapter):
    """Shortens timeouts to the remaining time of the call.

    A timeout only limits one silence, and a slow link may never be silent; so an endless body is aborted between two
    blocks.
    """

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, *args: Any, **options: Any
    ) -> Response:
        if budget := CURRENT.get():
            timeout = (budget.timeout(), budget.timeout())
            body: Any = request.body
            if isinstance(body, bytes | memoryview) and len(body) > BLOCK:
                request.body = _LimitedBody(memoryview(body), budget)  # type: ignore[assignment]  # any iterable works
        response = super().send(request, stream, timeout, *args, **options)
        if response.status_code >= 400:
            _ = (
                response.content
            )  # read now: Google's client doesn't read the body of a 401, which blocks the connection
        return response


class _LimitedBody:
    """A body that is sent in blocks, without a copy, until the time is up."""

    def __init__(self, body: memoryview, budget: RetryBudget) -> None:
        self._body, self._budget = body, budget

    def __len__(self) -> int:
        return len(self._body)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._body), BLOCK):
            if self._budget.left() <= 0:
                raise Timeout("the time limit passed while the body was sent")
            yield self._body[start : start + BLOCK]

"""The connection to Cloud Storage: every request keeps within the time of its call. Needs requests; imported late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import Timeout

from launch_train.common.storage.retry import CURRENT, Tries

BLOCK = 1 << 20
"""Bytes of a body between two looks at the clock."""


class PatientAdapter(HTTPAdapter):
    """Shortens timeouts to what is left of the call. A timeout is for one silence: a body that goes on and on is
    broken off between two blocks, for a link that is slow may never be silent."""

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, *args: Any, **options: Any
    ) -> Response:
        if tries := CURRENT.get():
            timeout = (tries.timeout(), tries.timeout())
            body: Any = request.body
            if isinstance(body, bytes | memoryview) and len(body) > BLOCK:
                request.body = _Paced(memoryview(body), tries)  # type: ignore[assignment]  # any iterable will do
        response = super().send(request, stream, timeout, *args, **options)
        if response.status_code >= 400:
            _ = response.content  # read now: Google's client leaves the text of a 401 unread, and the connection busy
        return response


class _Paced:
    """A body in blocks, not copied."""

    def __init__(self, body: memoryview, tries: Tries) -> None:
        self._body, self._tries = body, tries

    def __len__(self) -> int:
        return len(self._body)

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._body), BLOCK):
            if self._tries.left() <= 0:
                raise Timeout("the call's time was up while its body was sent")
            yield self._body[start : start + BLOCK]

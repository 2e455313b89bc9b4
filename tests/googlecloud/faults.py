"""What can go wrong between a client and the cloud, on order.

    fault = cloud.faults.add(Fault("storage.objects.insert", Status(503), name=r"^runs/", times=2, after=1))
    cloud.faults.down(until=clock() + 180)
    ...
    assert cloud.faults.used[fault] == 2

The first fault that fits a request has its effect on it. Operations have Google's names (storage.objects.insert for
every way to upload, storage.objects.get for metadata and bytes); "" is the name of a request that nobody here answers.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, Protocol

from tests.googlecloud import pieces
from tests.googlecloud.errors import ApiError
from tests.googlecloud.wire import Call, Request, Response, json_response

Serve = Callable[[Request], Response]
Step = Literal["begin", "chunk", "status", "cancel", "whole", "media", "metadata"]
"""Of storage.objects.insert: a resumable upload's beginning, its chunks, the question how far it got and its end by
the client; "whole" is an upload in one request. Of storage.objects.get: the bytes, or what is known of them."""


class Effect(Protocol):
    """What happens to a request; `serve` lets the cloud do what was asked."""

    step: ClassVar[Step | None]
    """The only step that this can happen to; None: any."""

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer, with what is sent of it."""


@dataclass(frozen=True)
class Fault:
    """`effect` on the requests of `operation` (a glob: storage.*) whose resource's name `name` (a regex) is found in.

    `after` such requests pass first; then `times` of them (None: all) have the effect. For lists the name is the
    prefix asked for, for storage.buckets.get the bucket.
    """

    operation: str
    effect: Effect
    name: str = ""
    step: Step | None = None
    times: int | None = 1
    after: int = 0

    def fits(self, call: Call) -> bool:
        """Whether a request is of the kind meant."""
        steps = {self.step, self.effect.step} - {None}
        named = re.search(self.name, call.target.name) is not None
        return named and fnmatchcase(call.operation, self.operation) and steps <= {call.target.step}


@dataclass(frozen=True)
class Outage:
    """`effect` on every request until a time of the cloud's clock."""

    until: float
    effect: Effect


class Faults:
    """The plan. `used` counts how often each fault and outage had its effect."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.used: Counter[Fault | Outage] = Counter()
        self._plan: list[_Planned] = []
        self._outages: list[Outage] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Plan a fault, behind those already planned. Answers it, as the key in `used`."""
        with self._lock:
            self._plan.append(_Planned(fault))
        return fault

    def down(self, until: float, effect: Effect | None = None) -> Outage:
        """Refuse everything before `until`: by a reset connection, or by `effect`, such as Status(503)."""
        outage = Outage(until, effect or Reset())
        with self._lock:
            self._outages.append(outage)
        return outage

    def clear(self) -> None:
        """Plan nothing more. What was used stays counted."""
        with self._lock:
            self._plan.clear()
            self._outages.clear()

    @property
    def planned(self) -> bool:
        """Whether a request could meet a fault at all."""
        return bool(self._plan or self._outages)

    def meet(self, call: Call) -> Effect | None:
        """The effect on this request, which is counted; None: it passes."""
        with self._lock:
            found = next((outage for outage in self._outages if self.clock() < outage.until), None)
            fault = found or next((entry.fault for entry in self._plan if entry.takes(call)), None)
            if fault is None:
                return None
            self.used[fault] += 1
            return fault.effect


@dataclass
class _Planned:
    """A fault and the number of requests that fitted it."""

    fault: Fault
    met: int = 0

    def takes(self, call: Call) -> bool:
        """Whether this request has the effect. Must be asked once for each request."""
        fault = self.fault
        if not fault.fits(call) or (fault.times is not None and self.met >= fault.after + fault.times):
            return False
        self.met += 1
        return self.met > fault.after


REASONS = {
    401: ("authError", "Invalid Credentials"),
    403: ("forbidden", "Forbidden"),
    404: ("notFound", "Not Found"),
    408: ("uploadBrokenConnection", "The request timed out."),
    410: ("gone", "The upload session is no longer available."),
    429: ("rateLimitExceeded", "The rate limit was exceeded. Please reduce your request rate."),
    500: ("internalError", "We encountered an internal error. Please try again."),
    502: ("", "Bad Gateway"),
    503: ("backendError", "We encountered an internal error. Please try again."),
    504: ("", "Gateway Timeout"),
}
"""By status: reason and text. Without a reason the answer isn't JSON: it comes from a proxy before the service.

Source: https://cloud.google.com/storage/docs/json_api/v1/status-codes, read in 2026.
"""


@dataclass(frozen=True)
class Status:
    """A refusal; nothing is done. `retry_after` is in seconds. Reason and message are Google's if not given;
    `info` is the ErrorInfo's reason of a newer API."""

    code: int
    retry_after: int | None = None
    reason: str = ""
    message: str = ""
    info: str = ""
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The refusal, as the operation's API shapes it."""
        usual, text = REASONS.get(self.code, ("backendError", "Backend Error"))
        reason, message = self.reason or usual, self.message or text
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if not reason:
            page = f"<html><title>Error {self.code}</title><p>{message}</html>".encode()
            return Response(page, self.code, {"Content-Type": "text/html; charset=UTF-8", **headers})
        newer = call.operation.startswith(("aiplatform.", "artifactregistry.", "cloudbuild."))
        error = ApiError(self.code, message, reason="" if newer else reason, info=self.info)
        return json_response(error.body(), self.code, headers)


@dataclass(frozen=True)
class Reset:
    """The connection is reset: before anything is done, or after (a lost answer)."""

    when: Literal["before", "after"] = "before"
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Nothing of an answer."""
        if self.when == "after":
            serve(call.request)
        return Response(head=False, shown=0, then="reset")


@dataclass(frozen=True)
class Slow:
    """Done at once, answered `seconds` later."""

    seconds: float
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer, late."""
        return replace(serve(call.request), wait=self.seconds)


@dataclass(frozen=True)
class Stalled:
    """Done, but no more than `sent` of the answer ever comes; the connection stays open until the client goes."""

    sent: Literal["nothing", "head", "half"] = "nothing"
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer's beginning."""
        response = serve(call.request)
        shown = pieces.size(response.pieces) // 2 if self.sent == "half" else 0
        return replace(response, head=self.sent != "nothing", shown=shown, then="hold")


@dataclass(frozen=True)
class Truncated:
    """The first `keep` bytes of the body (None: half of it), fewer than Content-Length says; then the end."""

    keep: int | None = None
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer's beginning."""
        response = serve(call.request)
        shown = pieces.size(response.pieces) // 2 if self.keep is None else self.keep
        return replace(response, shown=shown, then="close")


@dataclass(frozen=True)
class Torn:
    """One bit of byte `at` of the body (None: of the middle one) is flipped; length and headers are as ever."""

    at: int | None = None
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer, wrong. Raises ApiError 400 if it has no such byte."""
        response = serve(call.request)
        length = pieces.size(response.pieces)
        at = length // 2 if self.at is None else self.at
        if not 0 <= at < length:
            raise ApiError(400, f"{self} met an answer of {length} bytes ({call.operation} {call.target.name}).")
        return replace(response, body=pieces.flip(response.pieces, at))


@dataclass(frozen=True)
class KeepPart:
    """Of a chunk, only the first `size` bytes arrive: the answer is 308 with the range that is there."""

    size: int
    step: ClassVar[Step | None] = "chunk"

    def __call__(self, call: Call, serve: Serve) -> Response:
        """What the service says to a chunk with less in it than its Content-Range says."""
        return serve(replace(call.request, body=call.request.body[: self.size]))


@dataclass(frozen=True)
class LoseSession:
    """A resumable upload is forgotten with all that had arrived: 404, or 410."""

    code: Literal[404, 410] = 404
    step: ClassVar[Step | None] = "chunk"

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The refusal; a later request for the same upload finds none either."""
        serve(replace(call.request, method="DELETE", body=b""))
        return Status(self.code)(call, serve)

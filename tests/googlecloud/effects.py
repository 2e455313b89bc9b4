"""What a fault does to a request: refusals, and answers that come late, in part, wrong or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from tests.googlecloud import pieces
from tests.googlecloud.errors import ApiError
from tests.googlecloud.wire import Call, Request, Response, json_response

Serve = Callable[[Request], Response]
Step = Literal["begin", "chunk", "status", "cancel", "whole", "media", "metadata", "page"]
"""Of storage.objects.insert: a resumable upload's beginning, its chunks, the question how far it got and its end by
the client; "whole" is an upload in one request. Of storage.objects.get: the bytes, or what is known of them. Of a
list: "page" is any page but the first."""


class Effect(Protocol):
    """What happens to a request; `serve` lets the cloud do what was asked."""

    step: ClassVar[Step | None]
    """The only step that this can happen to; None: any."""

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer, with what is sent of it."""


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


NEWER = (
    *("aiplatform.", "artifactregistry.", "cloudbilling.", "cloudbuild.", "cloudresourcemanager."),
    *("logging.", "oslogin.", "secretmanager."),
)
"""Operations of the APIs that answer google.rpc.Status."""


@dataclass(frozen=True)
class Status:
    """A refusal; nothing is done. `retry_after` is in seconds. Reason and message are Google's if not given;
    `info` is the ErrorInfo's reason of a newer API, and `metadata` what else it holds."""

    code: int
    retry_after: int | None = None
    reason: str = ""
    message: str = ""
    info: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The refusal, as the operation's API shapes it."""
        usual, text = REASONS.get(self.code, ("backendError", "Backend Error"))
        reason, message = self.reason or usual, self.message or text
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if not reason:
            page = f"<html><title>Error {self.code}</title><p>{message}</html>".encode()
            return Response(page, self.code, {"Content-Type": "text/html; charset=UTF-8", **headers})
        newer = call.operation.startswith(NEWER)
        error = ApiError(self.code, message, reason="" if newer else reason, info=self.info, metadata=self.metadata)
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
    """`bits` of byte `at` of the body (None: of the middle one) are flipped; length and headers are as ever. With the
    highest bit, 0x80, ASCII becomes what isn't UTF-8."""

    at: int | None = None
    bits: int = 1
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer, wrong. Raises ApiError 400 if it has no such byte."""
        response = serve(call.request)
        length = pieces.size(response.pieces)
        at = length // 2 if self.at is None else self.at
        if not 0 <= at < length:
            raise ApiError(400, f"{self} met an answer of {length} bytes ({call.operation} {call.target.name}).")
        return replace(response, body=pieces.flip(response.pieces, at, self.bits))


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


@dataclass(frozen=True)
class PageGone:
    """The token of a list's next page is not known any more."""

    step: ClassVar[Step | None] = "page"

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The refusal; a list from its start is answered as ever."""
        return Status(400, reason="invalid", message="The page token is invalid.")(call, serve)


@dataclass(frozen=True)
class Meanwhile:
    """The request is served; before the answer is sent something else happens, such as a job that somebody creates
    while the pages of a list are read."""

    action: Callable[[], object]
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        """The answer, as it was before."""
        response = serve(call.request)
        self.action()
        return response

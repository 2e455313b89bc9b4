"""Effects of faults on the protocols that Google's clients recover from by themselves: uploads in parts, and pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from launcher.testing.googlecloud import Status
from launcher.testing.googlecloud.faults import Effect, Serve, Step
from launcher.testing.googlecloud.wire import Call, Response


@dataclass(frozen=True)
class KeepPart(Effect):
    """Only the first `size` bytes of a chunk arrive. The answer is 308 with the stored range."""

    size: int
    step: ClassVar[Step | None] = "chunk"

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Return the service's answer to a chunk that is shorter than its Content-Range."""
        return serve(replace(call.request, body=call.request.body[: self.size]))


@dataclass(frozen=True)
class LoseSession(Effect):
    """A resumable upload is lost with all of its bytes: 404, or 410."""

    code: Literal[404, 410] = 404
    step: ClassVar[Step | None] = "chunk"

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Return the refusal. Later requests for the same upload are refused too."""
        serve(replace(call.request, method="DELETE", body=b""))
        return Status(self.code)(call, serve)


@dataclass(frozen=True)
class PageGone(Effect):
    """The page token of a list has expired."""

    step: ClassVar[Step | None] = "page"

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Return the refusal. A list from the start works."""
        return Status(400, reason="invalid", message="The page token is invalid.")(call, serve)

"""What can go wrong between a client and a registry, on order.

    registry.faults.add(Fault("upload.*", Refuse(503), times=2, after=1))

The first fault that fits a request has its effect on it. Steps are ping, token, manifest.head, manifest.get,
manifest.put, blob.head, blob.get, mount, upload.begin, upload.chunk, upload.status, upload.finish, upload.cancel.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from launcher.testing.registry.wire import Request, Response, error

Serve = Callable[[Request], Response]


class Effect(Protocol):
    """What happens to a request; `serve` lets the registry do what was asked. `reads`: bytes of the body that come."""

    @property
    def reads(self) -> int | None: ...

    def __call__(self, request: Request, serve: Serve) -> Response: ...


@dataclass(frozen=True)
class Fault:
    """`effect` on the requests of a step (a glob): `after` of them pass first, then `times` have it (None: all)."""

    step: str
    effect: Effect
    times: int | None = 1
    after: int = 0


class Faults:
    """The plan. `used` counts how often each fault had its effect."""

    def __init__(self) -> None:
        self.used: Counter[Fault] = Counter()
        self._met: Counter[int] = Counter()
        self._plan: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Plan a fault, behind those already planned. Answers it, as the key in `used`."""
        with self._lock:
            self._plan.append(fault)
        return fault

    def meet(self, step: str) -> Effect | None:
        """The effect on a request of this step, which is counted; None: it passes."""
        with self._lock:
            for index, fault in enumerate(self._plan):
                if fnmatchcase(step, fault.step) and self._takes(index, fault):
                    self.used[fault] += 1
                    return fault.effect
        return None

    def _takes(self, index: int, fault: Fault) -> bool:
        if fault.times is not None and self._met[index] >= fault.after + fault.times:
            return False
        self._met[index] += 1
        return self._met[index] > fault.after


@dataclass(frozen=True)
class Refuse:
    """An error; nothing is done. `retry_after` is in seconds, or whatever else a registry may write there."""

    status: int
    code: str = "UNKNOWN"
    retry_after: int | str | None = None
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return error(self.status, self.code, headers=headers)


@dataclass(frozen=True)
class Reset:
    """The connection is reset before anything is done."""

    reads: int | None = 0

    def __call__(self, request: Request, serve: Serve) -> Response:
        return Response(then="reset")


@dataclass(frozen=True)
class Lost:
    """All is done, and the connection reset before the answer."""

    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        serve(request)
        return Response(then="reset")


@dataclass(frozen=True)
class CutOff:
    """The connection is reset in the body: the registry gets its first `reads` bytes."""

    reads: int | None

    def __call__(self, request: Request, serve: Serve) -> Response:
        serve(replace(request, whole=False))
        return Response(then="reset")


@dataclass(frozen=True)
class Torn:
    """The first byte is another one on arrival: of the body that is sent to the registry, or of the answer's."""

    of: str = "request"
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        if self.of == "request":
            return serve(replace(request, body=_torn(request.body)))
        response = serve(request)
        return replace(response, body=_torn(response.body))


def _torn(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:] if data else data


@dataclass(frozen=True)
class Says:
    """All is done, and a header of the answer says something else."""

    header: str
    value: str
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        response = serve(request)
        return replace(response, headers={**response.headers, self.header: self.value})


@dataclass(frozen=True)
class Forgets:
    """An upload is forgotten with all that had arrived."""

    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        serve(replace(request, method="DELETE", step="upload.cancel", body=b""))
        return serve(request)

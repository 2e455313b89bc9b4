"""Record requests and answers while a selftest runs.

Every HTTP request to Google goes through requests' HTTPAdapter, whichever client sends it: that one method is wrapped.
Vertex AI is called by gRPC, and by REST only in tests: its client is wrapped, and the messages of both are recorded as
JSON.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

ALIKE: Final = 3
"""Maximum number of recorded calls per step of one operation with the same status."""
NAMED: Final = re.compile(
    r"/(projects|locations|regions|zones|instances|operations|customJobs|repositories|builds|family|images(?!/family)"
    r"|machineTypes|subnetworks|services|b|o|users)/[^/:]+"
)
"""Parts of a path that precede a resource name."""
BLOB: Final = re.compile(r"^/v2/.+?/(manifests|blobs/uploads|blobs)/.*$")
"""A registry's paths. The repository's name contains slashes."""
SECRET: Final = re.compile(r"(oauth2|accounts|sts|iamcredentials|metadata)(\..*)?|169\.254\.169\.254")
"""Hosts whose requests or answers contain credentials."""
TOKENS: Final = re.compile(r"/computeMetadata/|/oauth2/|/token$")
"""Paths of requests for credentials, including those to a registry's token endpoint."""
METHODS: Final = {
    "create_custom_job": ("POST", ""),
    "get_custom_job": ("GET", "/*"),
    "list_custom_jobs": ("GET", ""),
    "cancel_custom_job": ("POST", "/*:cancel"),
    "delete_custom_job": ("DELETE", "/*"),
}
"""JobService's methods as REST requests (google/cloud/aiplatform/v1/job_service.proto)."""
JOBS: Final = "/v1/projects/*/locations/*/customJobs"


class Recorder:
    """The calls so far, as plain data. `step` is the current step."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.step = ""
        self._alike: Counter[tuple[str, str, Any]] = Counter()
        self._lock = threading.Lock()

    def note(self, operation: str, **call: Any) -> None:
        """Record a call. Of similar calls only the first ALIKE are kept."""
        key = (self.step, operation, call.get("status"))
        with self._lock:
            self._alike[key] += 1
            if self._alike[key] <= ALIKE:
                self.calls.append({"step": self.step, "operation": operation, **call})


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record every request and answer of this process inside the context."""
    from requests.adapters import HTTPAdapter

    from launcher.services import vertex as backend

    send, open_jobs = HTTPAdapter.send, backend.open_jobs

    def noted(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        began, is_stream = time.monotonic(), bool(options.get("stream", args[0] if args else False))
        try:
            response = send(self, request, *args, **options)
            answer = None
            if response is not None and not is_stream and "json" in response.headers.get("Content-Type", ""):
                answer = as_json(response.content)
        except Exception as error:
            seconds = time.monotonic() - began
            note_http(recorder, request, None, seconds=seconds, error=f"{type(error).__name__}: {error}")
            raise
        seconds = time.monotonic() - began
        note_http(recorder, request, response.status_code, answer=answer, seconds=seconds)
        return response

    HTTPAdapter.send = noted  # type: ignore[method-assign]  # records every request of the process until the block ends
    backend.open_jobs = lambda *words: Jobs(open_jobs(*words), recorder)
    try:
        yield
    finally:
        HTTPAdapter.send = send  # type: ignore[method-assign]  # as above
        backend.open_jobs = open_jobs


# --- REST -------------------------------------------------------------------------------------------------------------


def note_http(
    recorder: Recorder, request: Any, status: int | None, *, seconds: float, answer: Any = None, error: str = ""
) -> None:
    """Record one request. Headers are not recorded: they contain tokens and are not compared."""
    url = urlsplit(request.url)
    if template(url.path).startswith(JOBS):
        return
    is_secret = SECRET.fullmatch(url.hostname or "") or TOKENS.search(url.path)
    body = request.body if isinstance(request.body, str | bytes) and not is_secret else b""
    recorder.note(
        f"{request.method} {template(url.path)}",
        host=url.hostname,
        path=unquote(url.path),
        query={} if is_secret else dict(parse_qsl(url.query)),
        request=as_json(body),
        status=status,
        answer=None if is_secret else answer,
        seconds=round(seconds, 3),
        error=error,
    )


def template(path: str) -> str:
    """Return a path without resource names: /v1/projects/*/locations/*/customJobs."""
    return NAMED.sub(r"/\1/*", BLOB.sub(r"/v2/*/\1/*", path))


def as_json(body: str | bytes) -> Any:
    """Parse JSON; None: it is invalid."""
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


# --- Vertex AI --------------------------------------------------------------------------------------------------------


class Jobs:
    """Wraps Google's client for custom jobs. Each method takes request= and returns one message or a pager."""

    def __init__(self, client: Any, recorder: Recorder) -> None:
        self._client, self._recorder = client, recorder

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name not in METHODS:
            return method

        def call(*, request: Mapping[str, Any], **options: Any) -> Any:
            began = time.monotonic()
            verb, path = METHODS[name]
            noted = {"host": "aiplatform", "path": str(request.get("name") or request.get("parent"))}
            noted["request"] = message_json(request.get("custom_job"))
            try:
                answer = method(request=request, **options)
            except Exception as error:
                code, said = int(getattr(error, "code", 0) or 0), f"{type(error).__name__}: {error}"
                self._note(f"{verb} {JOBS}{path}", noted, began, code, None, said)
                raise
            self._note(f"{verb} {JOBS}{path}", noted, began, 200, message_json(answer), "")
            return answer

        return call

    def _note(self, operation: str, noted: dict[str, Any], began: float, status: int, answer: Any, error: str) -> None:
        seconds = round(time.monotonic() - began, 3)
        self._recorder.note(
            operation, **noted, query={}, status=status or None, answer=answer, seconds=seconds, error=error
        )


def message_json(message: Any) -> Any:
    """Return a Google message as canonical JSON (a pager's page, an operation's message); None for anything else."""
    from google.protobuf.json_format import MessageToDict

    message = getattr(message, "_response", getattr(message, "operation", message))
    plain = type(message).pb(message) if hasattr(type(message), "pb") else message
    return MessageToDict(plain) if hasattr(plain, "DESCRIPTOR") else None

"""Record requests and answers while a selftest runs, and compare those of Google with the loopback cloud's.

Every HTTP request to Google goes through requests' HTTPAdapter, whichever client sends it: that one method is wrapped.
Vertex AI is called by gRPC, and by REST only in tests: its client is wrapped, and the messages of both are recorded as
JSON.

The shape of an operation's answers is, for each field, the kinds of its values and, for enums, the values. Of ids,
times and other texts only the kind counts.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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


# --- Comparison -------------------------------------------------------------------------------------------------------

ENUM: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
FREE: Final = frozenset({"labels", "metadata", "metadatas", "env", "options", "items"})
"""Objects with keys that are names chosen by users, unless they are lists."""

Shape = dict[str, set[str]]
"""A field's dotted path (`a.b[].c`) -> its kinds (string, number, bool, null, object, list, enum:VALUE)."""


def differences(google: Iterable[Mapping[str, Any]], ours: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each difference between two recordings. Only operations that both have are compared."""
    theirs, mine = shapes(google), shapes(ours)
    for operation in sorted(theirs.keys() & mine.keys()):
        yield from (f"{operation}: {text}" for text in operation_differences(theirs[operation], mine[operation]))
    if unplayed := sorted(theirs.keys() - mine.keys()):
        yield f"not compared, the loopback cloud had no such call: {', '.join(unplayed)}"


def operation_differences(google: Shape, ours: Shape) -> Iterator[str]:
    """Yield the differences in one operation's answers.

    Fields below one that differs are skipped. So are the elements of a list that is empty on one side, because Google
    omits empty lists.
    """
    for path in sorted(google.keys() ^ ours.keys()):
        above = parent(path)
        known = not above or bool(kinds(google.get(above, ())) & kinds(ours.get(above, ())))
        is_empty = path.endswith("[]") or (path in ours and kinds(ours[path]) == {"list"})
        if known and not is_empty:
            yield f"missing field {path}" if path in google else f"extra field {path}"
    for path in sorted(google.keys() & ours.keys()):
        theirs, mine = kinds(google[path]), kinds(ours[path])
        values, known_values = enum_values(google[path]), enum_values(ours[path])
        if not theirs & mine:
            yield f"{path} is {' or '.join(sorted(theirs))}, not {' or '.join(sorted(mine))}"
        elif values and known_values and (others := values - known_values):
            yield f"{path} has other values: {', '.join(sorted(others))}"


def enum_values(field_kinds: Iterable[str]) -> set[str]:
    """Return the values of a field that is an enum."""
    return {kind.removeprefix("enum:") for kind in field_kinds if kind.startswith("enum:")}


def parent(path: str) -> str:
    """Return a.b for a.b.c and for a.b[]; empty at the top."""
    return path[:-2] if path.endswith("[]") else path.rpartition(".")[0]


def kinds(field_kinds: Iterable[str]) -> set[str]:
    """Return the kinds without enum values: an enum's value is a string."""
    return {kind.partition(":")[0].replace("enum", "string") for kind in field_kinds}


def shapes(calls: Iterable[Mapping[str, Any]]) -> dict[str, Shape]:
    """Return the union of the answers' shapes for each operation and status."""
    shape_of: dict[str, Shape] = {}
    for call in calls:
        if call.get("answer") is not None:
            add_value(shape_of.setdefault(f"{call['operation']} {call['status']}", {}), "", call["answer"])
    return shape_of


def add_value(shape: Shape, path: str, value: Any) -> None:
    """Add a value to a shape."""
    if path:
        shape.setdefault(path, set()).add(kind_of(value))
    if isinstance(value, Mapping):
        free = path.rpartition(".")[2] in FREE or any("/" in key for key in value)
        for key, each in value.items():
            add_value(shape, f"{path}.{'*' if free else key}".lstrip("."), each)
    elif isinstance(value, list):
        for each in value:
            add_value(shape, f"{path}[]", each)


def kind_of(value: Any) -> str:
    """Return the kind of one value."""
    if isinstance(value, str):
        return f"enum:{value}" if ENUM.fullmatch(value) and len(value) > 1 else "string"
    names = {bool: "bool", int: "number", float: "number", dict: "object", list: "list", type(None): "null"}
    return names[type(value)]

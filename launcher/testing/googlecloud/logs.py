"""Cloud Logging: entries:list, entries:write, and the log entries of Vertex AI's jobs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import quote

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.logfilters import compiled, nanoseconds, of_seconds, rfc3339
from launcher.testing.googlecloud.logwrites import written
from launcher.testing.googlecloud.protobufs import parse
from launcher.testing.googlecloud.wire import Request, Response, Route, Target, json_response, route

OPERATION = "logging.entries.list"
WRITE = "logging.entries.write"
ORDERS = ("", "timestamp asc", "timestamp desc")
PAGE, LARGEST_PAGE = 50, 1000
"""Entries per page: the default and the maximum."""
TEXT, INT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_INT32
REQUEST_FIELDS = (
    ("project_ids", 1, TEXT, True),
    ("resource_names", 8, TEXT, True),
    ("filter", 2, TEXT, False),
    ("order_by", 3, TEXT, False),
    ("page_size", 4, INT, False),
    ("page_token", 5, TEXT, False),
)
"""google.logging.v2.ListLogEntriesRequest (google/logging/v2/logging.proto): name, number, type, repeated."""


def _request_type() -> Any:
    """Build Google's message from its fields. The package that has it is not needed for anything else."""
    file = descriptor_pb2.FileDescriptorProto(
        name="google/logging/v2/logging.proto", package="google.logging.v2", syntax="proto3"
    )
    message = file.message_type.add(name="ListLogEntriesRequest")
    for name, number, kind, repeated in REQUEST_FIELDS:
        message.field.add(name=name, number=number, type=kind, label=3 if repeated else 1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("google.logging.v2.ListLogEntriesRequest")
    return message_factory.GetMessageClass(found)


ListLogEntriesRequest = _request_type()


@dataclass(frozen=True)
class Entry:
    """A log entry of a job, or of a VM, whose number is then in `job`.

    `timestamp` is the time of writing, `received` the time from which it can be read, in Unix nanoseconds. `shown` is
    its JSON.
    """

    timestamp: int
    insert_id: str
    received: int
    job: str
    task: str
    text: str
    shown: dict[str, Any]

    @property
    def place(self) -> tuple[int, str]:
        """Return the sort key of entries."""
        return self.timestamp, self.insert_id


class Logging:
    """The service.

    With `denied`, nobody may read; with `closed`, nobody may write. The next `empty_pages` answers have no entries but
    a page token: Google sends such pages if a search takes too long.
    """

    def __init__(self, project: str, number: str, clock: Callable[[], float]) -> None:
        self.project = project
        self.number = number
        self.clock = clock
        self.entries: list[Entry] = []
        self.denied = self.closed = False
        self.empty_pages = 0
        self._ids = count(1)
        self.routes: list[Route] = [
            route("POST", "/v2/entries:list", self.list_entries, OPERATION, _target),
            route("POST", "/v2/entries:write", self.write_entries, WRITE),
        ]

    def write(
        self,
        job_id: str,
        task: str,
        text: str,
        severity: str = "INFO",
        when: float | None = None,
        insert_id: str | None = None,
        *,
        late: float = 0.0,
        plain: bool = False,
    ) -> str:
        """Add an entry as Vertex AI does, and return its insertId. The platform's own messages have the task "service".

        It is written at `when` (Unix seconds; default: now) and can be read `late` seconds from now. The text is the
        message of a jsonPayload, or with `plain` a textPayload.
        """
        now = self.clock()
        at, received = of_seconds(now if when is None else when), of_seconds(now + late)
        insert_id = insert_id or f"{next(self._ids):014d}"
        log = f"ml.googleapis.com/{job_id}" if task == "service" else task
        said = {"message": text, "attrs": {"tag": task}, "levelname": severity}
        labels = {"job_id": job_id, "project_id": self.project, "task_name": task}
        shown = {
            "insertId": insert_id,
            **({"textPayload": text} if plain else {"jsonPayload": said}),
            "resource": {"type": "ml_job", "labels": labels},
            "timestamp": rfc3339(at),
            "severity": severity,
            "labels": {"ml.googleapis.com/job_id/log_area": "root"},
            "logName": f"projects/{self.project}/logs/{quote(log, safe='')}",
            "receiveTimestamp": rfc3339(received),
        }
        self.entries.append(Entry(at, insert_id, received, job_id, task, text, shown))
        return insert_id

    def write_entries(self, request: Request) -> Response:
        """Accept entries. Of two with the same time and insertId, only the first is kept."""
        request.only_query()
        mine = set() if self.closed else {self.project, self.number}
        taken, refusal = written(request.json(), len(request.body), mine, self.clock())
        known = {(entry.timestamp, entry.insert_id) for entry in self.entries}
        for shown in taken:
            entry = self._written(shown)
            if entry.place not in known:
                known.add(entry.place)
                self.entries.append(entry)
        if refusal:
            raise refusal
        return json_response({})

    def _written(self, shown: dict[str, Any]) -> Entry:
        shown = {"insertId": f"{next(self._ids):014d}", **shown, "receiveTimestamp": rfc3339(of_seconds(self.clock()))}
        job = shown["resource"].get("labels", {}).get("instance_id", "")
        task = shown.get("labels", {}).get("task_name", "")
        text = shown.get("textPayload") or shown.get("jsonPayload", {}).get("message", "")
        at = nanoseconds(shown["timestamp"])
        return Entry(at, shown["insertId"], of_seconds(self.clock()), job, task, text, shown)

    def list_entries(self, request: Request) -> Response:
        """Return a page of the entries that match a filter."""
        request.only_query()
        asked = parse(request.json(), ListLogEntriesRequest(), "request")
        self._allow([*asked.resource_names, *(f"projects/{name}" for name in asked.project_ids)])
        self._check(asked)
        passes, after = compiled(asked.filter), _after(asked)
        backwards = asked.order_by.endswith("desc")
        found = sorted(self._readable(), key=lambda entry: entry.place, reverse=backwards)
        behind = [e for e in found if after is None or (e.place < after if backwards else e.place > after)]
        matching = [entry for entry in behind if passes(entry.shown)]
        size = asked.page_size or PAGE
        if self.empty_pages and matching:
            self.empty_pages -= 1
            return json_response({"nextPageToken": _token(asked, after)})
        items = [entry.shown for entry in matching[:size]]
        more = {"nextPageToken": _token(asked, matching[size - 1].place)} if len(matching) > size else {}
        return json_response({**({"entries": items} if items else {}), **more})

    def _readable(self) -> list[Entry]:
        now = of_seconds(self.clock())
        return [entry for entry in self.entries if entry.received <= now]

    def _allow(self, resources: list[str]) -> None:
        if not resources:
            raise ApiError(400, "At least one resource name must be specified.")
        if self.denied or not {*resources} <= {f"projects/{self.project}", f"projects/{self.number}"}:
            raise ApiError(403, "Permission denied for all log views", info="IAM_PERMISSION_DENIED")

    def _check(self, asked: Any) -> None:
        if asked.order_by not in ORDERS:
            raise ApiError(400, f"order_by must be 'timestamp asc' or 'timestamp desc', not {asked.order_by!r}.")
        if not 0 <= asked.page_size <= LARGEST_PAGE:
            raise ApiError(400, f"page_size must be between 0 and {LARGEST_PAGE}.")


def _target(request: Request) -> Target:
    """Return the filter. A request for a later page is a separate step."""
    try:
        body = request.json()
    except ApiError:
        body = {}
    return Target(str(body.get("filter", "")), "page" if body.get("pageToken") else None)


def _token(asked: Any, after: tuple[int, str] | None) -> str:
    """Return the token of the next page, which is bound to the query. New entries don't shift pages."""
    return base64.urlsafe_b64encode(json.dumps([_question(asked), after]).encode()).decode()


def _after(asked: Any) -> tuple[int, str] | None:
    """Return the entry after which this page begins. Raises ApiError 400."""
    if not asked.page_token:
        return None
    try:
        question, after = json.loads(base64.urlsafe_b64decode(asked.page_token))
    except ValueError as error:
        raise ApiError(400, "page_token is invalid") from error
    if question != _question(asked):
        raise ApiError(400, "page_token doesn't match arguments from the request")
    return (int(after[0]), str(after[1])) if after else None


def _question(asked: Any) -> str:
    parts = [*asked.resource_names, *asked.project_ids, asked.filter, asked.order_by]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

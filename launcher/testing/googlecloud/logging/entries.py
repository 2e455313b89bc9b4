"""Cloud Logging: entries:list, entries:write, and the log entries of Vertex AI's jobs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import quote

from google.api import monitored_resource_pb2
from google.logging.type import log_severity_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, struct_pb2, timestamp_pb2

from launcher.testing.googlecloud.logging.filters import compiled, nanoseconds, of_seconds, rfc3339
from launcher.testing.googlecloud.protobufs import parse
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Route, Target, json_response, route

OPERATION = "logging.entries.list"
WRITE = "logging.entries.write"
ORDERS = ("", "timestamp asc", "timestamp desc")
PAGE, LARGEST_PAGE = 50, 1000
"""Entries per page: the default and the maximum."""
LARGEST_ENTRY = 256 * 1024
"""Cloud Logging's limit, measured approximately as the size of the message: https://cloud.google.com/logging/quotas."""
LARGEST_REQUEST = 10_000_000
RESOURCES = {"gce_instance": {"project_id", "instance_id", "zone"}, "global": {"project_id"}}
"""Labels of monitored resource types (https://cloud.google.com/logging/docs/api/v2/resource-list)."""
DAY_S = 24 * 3600


def _message_types() -> tuple[Any, Any]:
    """Build google.logging.v2's ListLogEntriesRequest and WriteLogEntriesRequest from the fields that are used here.

    Source: google/logging/v2/logging.proto and log_entry.proto. The package that has them is not needed for anything
    else.
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    text, number, flag = kinds.TYPE_STRING, kinds.TYPE_INT32, kinds.TYPE_BOOL
    file = descriptor_pb2.FileDescriptorProto(
        name="google/logging/v2/loopback.proto", package="google.logging.v2", syntax="proto3"
    )
    needed = (monitored_resource_pb2, log_severity_pb2, struct_pb2, timestamp_pb2)
    file.dependency.extend(module.DESCRIPTOR.name for module in needed)

    def add(message: Any, name: str, tag: int, kind: Any, *, many: bool = False, **more: Any) -> None:
        """Add a field, whose `kind` is a scalar type or the full name of a message."""
        if isinstance(kind, str):
            kind, more["type_name"] = more.pop("type", kinds.TYPE_MESSAGE), kind
        message.field.add(name=name, number=tag, type=kind, label=3 if many else 1, **more)

    def add_labels(message: Any, tag: int) -> None:
        """Add a field `map<string, string> labels`."""
        pair = message.nested_type.add(name="LabelsEntry")
        pair.options.map_entry = True
        add(pair, "key", 1, text)
        add(pair, "value", 2, text)
        add(message, "labels", tag, f".google.logging.v2.{message.name}.LabelsEntry", many=True)

    listing = file.message_type.add(name="ListLogEntriesRequest")
    add(listing, "project_ids", 1, text, many=True)
    add(listing, "resource_names", 8, text, many=True)
    add(listing, "filter", 2, text)
    add(listing, "order_by", 3, text)
    add(listing, "page_size", 4, number)
    add(listing, "page_token", 5, text)
    entry = file.message_type.add(name="LogEntry")
    entry.oneof_decl.add(name="payload")
    add(entry, "log_name", 12, text)
    add(entry, "resource", 8, ".google.api.MonitoredResource")
    add(entry, "text_payload", 3, text, oneof_index=0)
    add(entry, "json_payload", 6, ".google.protobuf.Struct", oneof_index=0)
    add(entry, "timestamp", 9, ".google.protobuf.Timestamp")
    add(entry, "severity", 10, ".google.logging.type.LogSeverity", type=kinds.TYPE_ENUM)
    add(entry, "insert_id", 4, text)
    add_labels(entry, 11)
    writing = file.message_type.add(name="WriteLogEntriesRequest")
    add(writing, "log_name", 1, text)
    add(writing, "resource", 2, ".google.api.MonitoredResource")
    add_labels(writing, 3)
    add(writing, "entries", 4, ".google.logging.v2.LogEntry", many=True)
    add(writing, "partial_success", 5, flag)
    add(writing, "dry_run", 6, flag)
    types = descriptor_pool.Default().AddSerializedFile(file.SerializeToString()).message_types_by_name
    message_class = message_factory.GetMessageClass
    return message_class(types["ListLogEntriesRequest"]), message_class(types["WriteLogEntriesRequest"])


ListLogEntriesRequest, WriteLogEntriesRequest = _message_types()


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
        query = parse(request.json(), ListLogEntriesRequest(), "request")
        self._allow([*query.resource_names, *(f"projects/{name}" for name in query.project_ids)])
        self._check(query)
        passes, after = compiled(query.filter), _after(query)
        backwards = query.order_by.endswith("desc")
        entries = sorted(self._readable(), key=lambda entry: entry.place, reverse=backwards)
        behind = [e for e in entries if after is None or (e.place < after if backwards else e.place > after)]
        matching = [entry for entry in behind if passes(entry.shown)]
        size = query.page_size or PAGE
        if self.empty_pages and matching:
            self.empty_pages -= 1
            return json_response({"nextPageToken": _token(query, after)})
        items = [entry.shown for entry in matching[:size]]
        more = {"nextPageToken": _token(query, matching[size - 1].place)} if len(matching) > size else {}
        return json_response({**({"entries": items} if items else {}), **more})

    def _readable(self) -> list[Entry]:
        now = of_seconds(self.clock())
        return [entry for entry in self.entries if entry.received <= now]

    def _allow(self, resources: list[str]) -> None:
        if not resources:
            raise ApiError(400, "At least one resource name must be specified.")
        if self.denied or not {*resources} <= {f"projects/{self.project}", f"projects/{self.number}"}:
            raise ApiError(403, "Permission denied for all log views", info="IAM_PERMISSION_DENIED")

    def _check(self, query: Any) -> None:
        if query.order_by not in ORDERS:
            raise ApiError(400, f"order_by must be 'timestamp asc' or 'timestamp desc', not {query.order_by!r}.")
        if not 0 <= query.page_size <= LARGEST_PAGE:
            raise ApiError(400, f"page_size must be between 0 and {LARGEST_PAGE}.")


def _target(request: Request) -> Target:
    """Return the filter. A request for a later page is a separate step."""
    try:
        body = request.json()
    except ApiError:
        body = {}
    return Target(str(body.get("filter", "")), "page" if body.get("pageToken") else None)


def _token(query: Any, after: tuple[int, str] | None) -> str:
    """Return the token of the next page, which is bound to the query. New entries don't shift pages."""
    return base64.urlsafe_b64encode(json.dumps([_question(query), after]).encode()).decode()


def _after(query: Any) -> tuple[int, str] | None:
    """Return the entry after which this page begins. Raises ApiError 400."""
    if not query.page_token:
        return None
    try:
        question, after = json.loads(base64.urlsafe_b64decode(query.page_token))
    except ValueError as error:
        raise ApiError(400, "page_token is invalid") from error
    if question != _question(query):
        raise ApiError(400, "page_token doesn't match arguments from the request")
    return (int(after[0]), str(after[1])) if after else None


def _question(query: Any) -> str:
    parts = [*query.resource_names, *query.project_ids, query.filter, query.order_by]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Written(NamedTuple):
    """A parsed request: its entries as JSON, with the common fields filled in, and the refusals of some entries."""

    entries: list[dict[str, Any]]
    refusal: ApiError | None


def written(body: dict[str, Any], size: int, projects: set[str], now: float) -> Written:
    """Parse a request. Raises ApiError: all of it is refused. `now` (Unix seconds) is the default time of an entry."""
    if size > LARGEST_REQUEST:
        raise ApiError(400, f"Request payload size exceeds the limit: {LARGEST_REQUEST} bytes.")
    request = parse(body, WriteLogEntriesRequest(), "request")
    if not request.entries:
        raise ApiError(400, "A list of entries is required")
    entries: list[dict[str, Any]] = []
    refusal = None
    for entry in request.entries:
        try:
            entries.append(_entry(request, entry, projects, now))
        except ApiError as error:
            if not request.partial_success or error.code == 403:
                raise
            refusal = refusal or error
    return Written([] if request.dry_run else entries, refusal)


def _entry(request: Any, entry: Any, projects: set[str], now: float) -> dict[str, Any]:
    if not entry.log_name:
        entry.log_name = request.log_name
    if not entry.HasField("resource"):
        entry.resource.CopyFrom(request.resource)
    for key, value in request.labels.items():
        if key not in entry.labels:
            entry.labels[key] = value
    _check(entry, projects, now)
    if not entry.HasField("timestamp"):
        entry.timestamp.FromNanoseconds(round(now * 1e6) * 1000)
    shown: dict[str, Any] = json_format.MessageToDict(entry)
    return {"severity": "DEFAULT", **shown}


def _check(entry: Any, projects: set[str], now: float) -> None:
    """Check an entry. Raises ApiError."""
    parts = entry.log_name.split("/")
    if len(parts) != 4 or parts[0] != "projects" or parts[2] != "logs" or not parts[3]:
        raise ApiError(400, f"Invalid log name: {entry.log_name!r}")
    if parts[1] not in projects:
        denied = "Permission 'logging.logEntries.create' denied on resource (or it may not exist)."
        raise ApiError(403, denied, info="IAM_PERMISSION_DENIED")
    wanted = RESOURCES.get(entry.resource.type)
    if wanted is None or not set(entry.resource.labels) <= wanted:
        raise ApiError(400, f"Invalid resource: {entry.resource.type!r} with {sorted(entry.resource.labels)}")
    if (bytes_ := entry.ByteSize()) > LARGEST_ENTRY:
        raise ApiError(400, f"Log entry with size {bytes_ / 1024:.1f}K exceeds maximum size of 256.0K")
    if len(entry.labels) > 64:
        raise ApiError(400, "Log entry has more than 64 labels")
    if entry.timestamp.seconds > now + DAY_S:
        raise ApiError(400, "Log entry timestamp is more than 1 day in the future")

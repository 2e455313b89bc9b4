"""Cloud Logging: entries:list, entries:write, and the log entries of Vertex AI's jobs."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from launcher.testing.googlecloud.filters import Test, compiled, field_at, ordered, unparseable
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Target, json_response, route

WRITE = "logging.entries.write"
PAGE = 50
"""Entries per page by default."""
LARGEST_ENTRY = 256 * 1024
"""Cloud Logging's limit, measured approximately, as the size of the JSON: https://cloud.google.com/logging/quotas."""
LARGEST_REQUEST = 10_000_000
RESOURCES = {"gce_instance": {"project_id", "instance_id", "zone"}, "global": {"project_id"}}
"""Labels of monitored resource types (https://cloud.google.com/logging/docs/api/v2/resource-list)."""
Severity = Literal["DEFAULT", "DEBUG", "INFO", "NOTICE", "WARNING", "ERROR", "CRITICAL", "ALERT", "EMERGENCY"]
TIMES = ("timestamp", "receiveTimestamp")
FIELDS = ("logName", "resource", *TIMES, "severity", "insertId", "labels", "textPayload", "jsonPayload")


class Body(msgspec.Struct, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """A message of google/logging/v2/logging.proto or log_entry.proto, with the fields that are used here.

    The package that has them is not needed for anything else.
    """


class MonitoredResource(Body):
    type: str = ""
    labels: dict[str, str] = {}


class LogEntry(Body):
    log_name: str = ""
    resource: MonitoredResource | None = None
    text_payload: str = ""
    json_payload: dict[str, Any] = {}
    timestamp: str = ""
    severity: Severity = "DEFAULT"
    insert_id: str = ""
    labels: dict[str, str] = {}


class ListLogEntriesRequest(Body):
    resource_names: list[str] = []
    filter: str = ""
    order_by: str = ""
    page_size: int = 0
    page_token: str = ""


class WriteLogEntriesRequest(Body):
    log_name: str = ""
    resource: MonitoredResource = msgspec.field(default_factory=MonitoredResource)
    labels: dict[str, str] = {}
    entries: list[LogEntry] = []
    partial_success: bool = False


def read_body(request: Request, kind: Any) -> Any:
    """Parse a request's body. Raises ApiError 400."""
    try:
        return msgspec.convert(request.json(), kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"Invalid JSON payload received. {error}") from error


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


def _target(request: Request) -> Target:
    """Return the filter. A request for a later page is a separate step."""
    try:
        body = request.json()
    except ApiError:
        body = {}
    return Target(str(body.get("filter", "")), "page" if body.get("pageToken") else None)


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
        payload = {"message": text, "attrs": {"tag": task}, "levelname": severity}
        labels = {"job_id": job_id, "project_id": self.project, "task_name": task}
        shown = {
            "insertId": insert_id,
            **({"textPayload": text} if plain else {"jsonPayload": payload}),
            "resource": {"type": "ml_job", "labels": labels},
            "timestamp": rfc3339(at),
            "severity": severity,
            "labels": {"ml.googleapis.com/job_id/log_area": "root"},
            "logName": f"projects/{self.project}/logs/{quote(log, safe='')}",
            "receiveTimestamp": rfc3339(received),
        }
        self.entries.append(Entry(at, insert_id, received, job_id, task, text, shown))
        return insert_id

    @route("POST", "/v2/entries:write", WRITE)
    def write_entries(self, request: Request) -> Response:
        """Accept entries. Of two with the same time and insertId, only the first is kept."""
        if len(request.body) > LARGEST_REQUEST:
            raise ApiError(400, f"Request payload size exceeds the limit: {LARGEST_REQUEST} bytes.")
        body = read_body(request, WriteLogEntriesRequest)
        accepted: list[Entry] = []
        refusal = None
        for entry in body.entries:
            try:
                accepted.append(self._accepted(body, entry))
            except ApiError as error:
                if not body.partial_success or error.code == 403:
                    raise
                refusal = refusal or error
        known = {entry.place for entry in self.entries}
        for taken in accepted:
            if taken.place not in known:
                known.add(taken.place)
                self.entries.append(taken)
        if refusal:
            raise refusal
        return json_response({})

    def _accepted(self, body: WriteLogEntriesRequest, entry: LogEntry) -> Entry:
        """Return an entry with the request's common fields filled in. Raises ApiError."""
        now = self.clock()
        entry.log_name, entry.resource = entry.log_name or body.log_name, entry.resource or body.resource
        entry.labels = {**body.labels, **entry.labels}
        parts = entry.log_name.split("/")
        if self.closed or parts[1] not in (self.project, self.number):
            denied = "Permission 'logging.logEntries.create' denied on resource (or it may not exist)."
            raise ApiError(403, denied, info="IAM_PERMISSION_DENIED")
        kind, labels = entry.resource.type, entry.resource.labels
        if kind not in RESOURCES or not {*labels} <= RESOURCES[kind]:
            raise ApiError(400, f"Invalid resource: {kind!r} with {sorted(labels)}")
        if (size := len(msgspec.json.encode(entry))) > LARGEST_ENTRY:
            raise ApiError(400, f"Log entry with size {size / 1024:.1f}K exceeds maximum size of 256.0K")
        at = nanoseconds(entry.timestamp) if entry.timestamp else of_seconds(now)
        entry.timestamp, entry.insert_id = rfc3339(at), entry.insert_id or f"{next(self._ids):014d}"
        text = entry.text_payload or entry.json_payload.get("message", "")
        shown = {"severity": "DEFAULT", **msgspec.to_builtins(entry), "receiveTimestamp": rfc3339(of_seconds(now))}
        job, task = labels.get("instance_id", ""), entry.labels.get("task_name", "")
        return Entry(at, entry.insert_id, of_seconds(now), job, task, text, shown)

    @route("POST", "/v2/entries:list", "logging.entries.list", target=_target)
    def list_entries(self, request: Request) -> Response:
        """Return a page of the entries that match a filter."""
        query: ListLogEntriesRequest = read_body(request, ListLogEntriesRequest)
        if self.denied or not {*query.resource_names} <= {f"projects/{self.project}", f"projects/{self.number}"}:
            raise ApiError(403, "Permission denied for all log views", info="IAM_PERMISSION_DENIED")
        try:
            position = json.loads(base64.urlsafe_b64decode(query.page_token)) if query.page_token else None
        except ValueError as error:
            raise ApiError(400, "page_token is invalid") from error
        after = tuple(position) if position else None
        passes, now = compiled(query.filter, compare), of_seconds(self.clock())
        backwards = query.order_by.endswith("desc")
        readable = [entry for entry in self.entries if entry.received <= now]
        entries = sorted(readable, key=lambda entry: entry.place, reverse=backwards)
        behind = [e for e in entries if after is None or (e.place < after if backwards else e.place > after)]
        matching = [entry for entry in behind if passes(entry.shown)]
        size = query.page_size or PAGE
        if self.empty_pages and matching:
            self.empty_pages -= 1
            return json_response({"nextPageToken": _token(after)})
        items = [entry.shown for entry in matching[:size]]
        more = {"nextPageToken": _token(matching[size - 1].place)} if len(matching) > size else {}
        return json_response({**({"entries": items} if items else {}), **more})


def _token(after: tuple[int, str] | None) -> str:
    """Return the token of the page after an entry. New entries don't shift pages."""
    return base64.urlsafe_b64encode(json.dumps(after).encode()).decode()


def compare(field: str, sign: str, value: str) -> Test:
    """Return a comparison of an entry's field. Texts are compared without regard to case. Raises ApiError 400."""
    if field.partition(".")[0] not in FIELDS:
        raise ApiError(400, f"Field not found: '{field}'.")
    if "-" in field.partition('"')[0]:  # it must be quoted
        raise unparseable(field)
    if field in TIMES:
        return ordered(lambda entry: nanoseconds(entry[field]), sign, nanoseconds(value))

    def text(entry: dict[str, Any]) -> str | None:
        actual = field_at(entry, field.replace('"', ""))
        return None if actual is None else str(actual).casefold()

    return ordered(text, sign, value.casefold())


@lru_cache(maxsize=100_000)
def nanoseconds(text: str) -> int:
    """Parse an RFC 3339 time, or a date, to Unix nanoseconds. Raises ApiError 400."""
    moment = Timestamp()
    try:
        moment.FromJsonString(text if "T" in text else f"{text}T00:00:00Z")
    except ValueError as error:
        raise ApiError(400, f"Invalid timestamp: {text!r}") from error
    return int(moment.ToNanoseconds())


def rfc3339(nanos: int) -> str:
    """Format Unix nanoseconds as Google does: with 0, 3, 6 or 9 fractional digits."""
    moment = Timestamp()
    moment.FromNanoseconds(nanos)
    return str(moment.ToJsonString())


def of_seconds(seconds: float) -> int:
    """Convert Unix seconds to nanoseconds, with microsecond precision, the limit of a float."""
    return round(datetime.fromtimestamp(seconds, UTC).timestamp() * 1_000_000) * 1000

"""entries:write: Google's messages, and validation."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.api import monitored_resource_pb2
from google.logging.type import log_severity_pb2
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, struct_pb2, timestamp_pb2

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.protobufs import parse

Kind = descriptor_pb2.FieldDescriptorProto
LARGEST_ENTRY = 256 * 1024
"""Cloud Logging's limit, measured approximately as the size of the message: https://cloud.google.com/logging/quotas."""
LARGEST_REQUEST = 10_000_000
RESOURCES = {"gce_instance": {"project_id", "instance_id", "zone"}, "global": {"project_id"}}
"""Labels of monitored resource types (https://cloud.google.com/logging/docs/api/v2/resource-list)."""
DAY_S = 24 * 3600


def _request_type() -> Any:
    """Build google.logging.v2.WriteLogEntriesRequest from the fields that are used here.

    Source: google/logging/v2/logging.proto and log_entry.proto. The package that has it is not needed for anything
    else.
    """
    file = descriptor_pb2.FileDescriptorProto(name="google/logging/v2/write.proto", package="google.logging.v2")
    file.syntax = "proto3"
    needed = (monitored_resource_pb2, log_severity_pb2, struct_pb2, timestamp_pb2)
    file.dependency.extend(module.DESCRIPTOR.name for module in needed)
    entry = file.message_type.add(name="LogEntry")
    entry.oneof_decl.add(name="payload")
    entry.field.add(name="log_name", number=12, type=Kind.TYPE_STRING, label=1)
    _message(entry, "resource", 8, ".google.api.MonitoredResource")
    entry.field.add(name="text_payload", number=3, type=Kind.TYPE_STRING, label=1, oneof_index=0)
    _message(entry, "json_payload", 6, ".google.protobuf.Struct", oneof_index=0)
    _message(entry, "timestamp", 9, ".google.protobuf.Timestamp")
    severity = ".google.logging.type.LogSeverity"
    entry.field.add(name="severity", number=10, type=Kind.TYPE_ENUM, label=1, type_name=severity)
    entry.field.add(name="insert_id", number=4, type=Kind.TYPE_STRING, label=1)
    _labels(entry, 11, "LogEntry")
    request = file.message_type.add(name="WriteLogEntriesRequest")
    request.field.add(name="log_name", number=1, type=Kind.TYPE_STRING, label=1)
    _message(request, "resource", 2, ".google.api.MonitoredResource")
    _labels(request, 3, "WriteLogEntriesRequest")
    _message(request, "entries", 4, ".google.logging.v2.LogEntry", label=3)
    request.field.add(name="partial_success", number=5, type=Kind.TYPE_BOOL, label=1)
    request.field.add(name="dry_run", number=6, type=Kind.TYPE_BOOL, label=1)
    pool = descriptor_pool.Default()
    found = pool.AddSerializedFile(file.SerializeToString()).message_types_by_name["WriteLogEntriesRequest"]
    return message_factory.GetMessageClass(found)


def _message(owner: Any, name: str, number: int, kind: str, *, label: int = 1, oneof_index: int | None = None) -> None:
    field = owner.field.add(name=name, number=number, type=Kind.TYPE_MESSAGE, label=label, type_name=kind)
    if oneof_index is not None:
        field.oneof_index = oneof_index


def _labels(owner: Any, number: int, name: str) -> None:
    """Add a field `map<string, string> labels`."""
    pair = owner.nested_type.add(name="LabelsEntry")
    pair.options.map_entry = True
    pair.field.add(name="key", number=1, type=Kind.TYPE_STRING, label=1)
    pair.field.add(name="value", number=2, type=Kind.TYPE_STRING, label=1)
    _message(owner, "labels", number, f".google.logging.v2.{name}.LabelsEntry", label=3)


WriteLogEntriesRequest = _request_type()


class Written(NamedTuple):
    """A parsed request: its entries as JSON, with the common fields filled in, and the refusals of some entries."""

    entries: list[dict[str, Any]]
    refusal: ApiError | None


def written(body: dict[str, Any], size: int, projects: set[str], now: float) -> Written:
    """Parse a request. Raises ApiError: all of it is refused. `now` (Unix seconds) is the default time of an entry."""
    if size > LARGEST_REQUEST:
        raise ApiError(400, f"Request payload size exceeds the limit: {LARGEST_REQUEST} bytes.")
    asked = parse(body, WriteLogEntriesRequest(), "request")
    if not asked.entries:
        raise ApiError(400, "A list of entries is required")
    found: list[dict[str, Any]] = []
    refusal = None
    for entry in asked.entries:
        try:
            found.append(_entry(asked, entry, projects, now))
        except ApiError as error:
            if not asked.partial_success or error.code == 403:
                raise
            refusal = refusal or error
    return Written([] if asked.dry_run else found, refusal)


def _entry(asked: Any, entry: Any, projects: set[str], now: float) -> dict[str, Any]:
    if not entry.log_name:
        entry.log_name = asked.log_name
    if not entry.HasField("resource"):
        entry.resource.CopyFrom(asked.resource)
    for key, value in asked.labels.items():
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

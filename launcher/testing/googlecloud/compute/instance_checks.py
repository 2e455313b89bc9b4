"""Validate an Instance as Compute Engine does, with its messages where they are known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from google.cloud import compute_v1

from launcher.testing.googlecloud.compute.capacity import ATTACHED, shapes
from launcher.testing.googlecloud.protobufs import parse
from launcher.testing.googlecloud.wire import ApiError

NAME = r"(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)"
LABEL = re.compile(r"[\w-]{0,63}")
KEY = re.compile(r"[a-zA-Z0-9_-]{1,128}")
GPU_SERIES = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")
PARTS = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
"""Machine types that are available neither on demand nor by reservation (GPU machine types, 2026-04-14)."""
NO_STANDARD_DISK = ("a3-", "g2-")
HYPERDISK_ONLY = ("a3-ultragpu-", "a4-", "a4x-", "g4-")
VALUE_MOST, METADATA_MOST = 1 << 18, 1 << 19
RUN_LEAST, RUN_MOST = 30, 120 * 86400
FLEX_MOST, WAIT_LEAST, WAIT_MOST = 7 * 86400, 90, 7200
DISCARD = (
    "VM has a Local SSD attached but an undefined value for `discard-local-ssd`. If using gcloud, please add "
    "`--discard-local-ssd=false` or `--discard-local-ssd=true` to your command."
)

Properties = Any
"""A compute_v1.Instance or InstanceProperties."""


def parse_instance(body: dict[str, Any]) -> compute_v1.Instance:
    """Parse the body of instances.insert to Google's type. Raises ApiError as Compute Engine does."""
    message = parse(body, compute_v1.Instance.pb()(), "resource")
    instance = compute_v1.Instance.wrap(message)
    if not instance.name:
        raise _missing("resource.name")
    check_name(instance.name, "resource.name")
    check_properties(instance, "resource")
    _check_wait(instance)
    return instance


def parse_bulk(body: dict[str, Any]) -> compute_v1.BulkInsertInstanceResource:
    """Parse the body of instances.bulkInsert to Google's type. Raises ApiError as Compute Engine does."""
    message = parse(body, compute_v1.BulkInsertInstanceResource.pb()(), "resource")
    bulk = compute_v1.BulkInsertInstanceResource.wrap(message)
    names = list(bulk.per_instance_properties)
    if not bulk.count:
        raise _missing("resource.count")
    if not names and not bulk.name_pattern:
        raise _missing("resource.namePattern")
    if names and len(names) != bulk.count:
        raise invalid("resource.perInstanceProperties", "", f"There must be {bulk.count} of them, one for each VM.")
    for name in names:
        check_name(name, "resource.perInstanceProperties")
    if bulk.min_count > bulk.count:
        raise invalid("resource.minCount", bulk.min_count, f"It must be at most count, {bulk.count}.")
    properties = bulk.instance_properties
    if "/" in properties.machine_type:
        text = "Instance properties must provide existing machine type."
        raise invalid("resource.instanceProperties.machineType", properties.machine_type, text)
    check_properties(properties, "resource.instanceProperties")
    return bulk


def check_properties(instance: Properties, path: str) -> None:
    """Check the properties of one VM, or of each of several. Raises ApiError."""
    for field, value in (
        ("machineType", instance.machine_type),
        ("disks", instance.disks),
        ("networkInterfaces", instance.network_interfaces),
    ):
        if not value:
            raise _missing(f"{path}.{field}")
    for check in (_model, _accelerators, _disks, _run_time, _reservation):
        check(instance, path)
    check_labels(dict(instance.labels), f"{path}.labels")
    items = [(item.key, item.value) for item in instance.metadata.items]
    check_metadata(items, f"{path}.metadata")


def check_name(name: str, path: str) -> None:
    """Check a name, which must be a host name (RFC 1035). Raises ApiError."""
    if not re.fullmatch(NAME, name):
        raise invalid(path, name, f"Must be a match of regex '{NAME}'")


def check_labels(labels: dict[str, str], path: str) -> None:
    """Check labels. Raises ApiError."""
    for key, value in labels.items():
        for what, text in (("key", key), ("value", value)):
            if text != text.lower() or not LABEL.fullmatch(text) or (what == "key" and not text[:1].isalpha()):
                rule = "can only contain lowercase letters, numeric characters, underscores and dashes. "
                rule += f"The {what} can be at most 63 characters long. International characters are allowed."
                raise invalid(path, "", f"Label {what} '{text}' violates format constraints. The {what} {rule}")
    if len(labels) > 64:
        raise invalid(path, "", "At most 64 labels can be set.")


def check_metadata(items: list[tuple[str, str]], path: str) -> None:
    """Check metadata items. Raises ApiError."""
    for n, (key, value) in enumerate(items):
        if not KEY.fullmatch(key):
            raise invalid(f"{path}.items[{n}].key", key, f"Must be a match of regex '{KEY.pattern}'")
        if key in [other for other, _ in items[:n]]:
            raise invalid(path, "", f"Metadata has duplicate key: '{key}'.")
        if (size := len(value.encode())) > VALUE_MOST:
            text = f"Value for field '{path}.items[{n}].value' is too large: "
            raise bad(f"{text}maximum size {VALUE_MOST} character(s); actual size {size}.")
    if (size := sum(len(key.encode()) + len(value.encode()) for key, value in items)) > METADATA_MOST:
        raise bad(f"Metadata is too large: maximum size {METADATA_MOST} bytes; actual size {size}.")


def _model(instance: Properties, path: str) -> None:
    scheduling, machine = instance.scheduling, last(instance.machine_type)
    model, field = scheduling.provisioning_model, f"{path}.scheduling.provisioningModel"
    if scheduling.preemptible and model not in ("", "SPOT"):
        raise invalid(field, model, "For preemptible, only allowed provisioning_model value is SPOT")
    spot = scheduling.preemptible or model in ("SPOT", "FLEX_START")
    if spot and scheduling.automatic_restart:
        text = "Scheduling must have preemptible be false when AutomaticRestart is true."
        raise invalid(f"{path}.scheduling.preemptible", "true", text)
    if machine in PARTS and not spot:
        raise invalid(field, model or "STANDARD", f"Machine type {machine} requires SPOT or FLEX_START.")
    if scheduling.on_host_maintenance != "TERMINATE" and (
        instance.guest_accelerators or machine.startswith(GPU_SERIES)
    ):
        raise bad("Instances with guest accelerators do not support live migration.")


def _accelerators(instance: Properties, path: str) -> None:
    machine = last(instance.machine_type)
    for entry in instance.guest_accelerators:
        kind = last(entry.accelerator_type)
        fits = machine.startswith("n1-") and kind in ATTACHED
        if not fits or entry.accelerator_count not in (1, 2, 4, 8) or entry.accelerator_count > ATTACHED[kind]:
            raise bad(f"[{kind}, {machine}] features are not compatible for creating instance.")


def _disks(instance: Properties, path: str) -> None:
    machine = last(instance.machine_type)
    if not instance.disks[0].boot:
        raise invalid(f"{path}.disks[0].boot", "false", "Boot disk must be the first disk attached to the instance.")
    for disk in instance.disks:
        kind = last(disk.initialize_params.disk_type)
        if disk.type_ == "SCRATCH" and kind not in ("", "local-ssd"):
            raise bad(f"Disk type {kind} is not supported for a SCRATCH disk.")
        old = kind == "pd-standard" and machine.startswith(NO_STANDARD_DISK)
        new = kind.startswith("pd-") and machine.startswith(HYPERDISK_ONLY)
        if old or new:
            raise bad(f"Disk type {kind} is not supported for machine type {machine}.")


def _run_time(instance: Properties, path: str) -> None:
    scheduling, field = instance.scheduling, f"{path}.scheduling"
    seconds = scheduling.max_run_duration.seconds
    if seconds and not scheduling.instance_termination_action:
        raise invalid(field, "", "You must specify instanceTerminationAction when maxRunDuration is set.")
    if seconds and not RUN_LEAST <= seconds <= RUN_MOST:
        text = f"It must be between {RUN_LEAST} and {RUN_MOST} seconds."
        raise invalid(f"{field}.maxRunDuration", seconds, text)
    if scheduling.provisioning_model == "FLEX_START" and not 0 < seconds <= FLEX_MOST:
        text = f"For FLEX_START it must be set, to at most {FLEX_MOST} seconds."
        raise invalid(f"{field}.maxRunDuration", seconds, text)
    stops = seconds and scheduling.instance_termination_action == "STOP"
    if stops and has_local_ssd(instance) and not scheduling.on_instance_stop_action.discard_local_ssd:
        raise bad(DISCARD)


def _reservation(instance: Properties, path: str) -> None:
    model, kind = instance.scheduling.provisioning_model, instance.reservation_affinity.consume_reservation_type
    field = f"{path}.reservationAffinity.consumeReservationType"
    if model == "FLEX_START" and kind != "NO_RESERVATION":
        raise invalid(field, kind, "For FLEX_START, only allowed value is NO_RESERVATION")
    if model == "RESERVATION_BOUND" and kind != "SPECIFIC_RESERVATION":
        raise invalid(field, kind, "For RESERVATION_BOUND, only allowed value is SPECIFIC_RESERVATION")
    if kind == "SPECIFIC_RESERVATION" and model in ("SPOT", "FLEX_START"):
        raise invalid(field, kind, f"A reservation can't be consumed by a VM that is {model}.")


def _check_wait(instance: compute_v1.Instance) -> None:
    if "request_valid_for_duration" not in instance.params:
        return
    seconds, field = instance.params.request_valid_for_duration.seconds, "resource.params.requestValidForDuration"
    if instance.scheduling.provisioning_model != "FLEX_START":
        raise invalid(field, seconds, "It can only be set for FLEX_START.")
    if seconds and not WAIT_LEAST <= seconds <= WAIT_MOST:
        raise invalid(field, seconds, f"It must be 0, or between {WAIT_LEAST} and {WAIT_MOST} seconds.")


def has_local_ssd(instance: Properties) -> bool:
    """Return whether a VM has local SSDs, listed or built into its machine type."""
    known = shapes().get(last(instance.machine_type))
    return bool(known and known.local_ssds) or any(disk.type_ == "SCRATCH" for disk in instance.disks)


def last(link: str) -> str:
    return link.rpartition("/")[2]


def invalid(path: str, value: object, text: str) -> ApiError:
    return bad(f"Invalid value for field '{path}': '{value}'. {text}")


def bad(message: str) -> ApiError:
    return ApiError(400, message, reason="invalid")


def _missing(path: str) -> ApiError:
    return bad(f"Invalid value for field '{path}': ''. Required field is missing.")


def numbered(pattern: str, count: int) -> Iterator[str]:
    """Yield the names of a pattern in which hash signs stand for a number: web-### yields web-001, web-002, …."""
    hashes = re.search(r"#+", pattern)
    width = len(hashes[0]) if hashes else 0
    return (re.sub(r"#+", f"{n:0{width}d}", pattern, count=1) for n in range(1, count + 1))

"""Validate a CustomJob as Vertex AI does, beyond its shape. Pure.

Messages are Google's where they are known (combinations, permissions, labels and required fields). Where only the rule
is documented, the field is Google's and the message states the rule. machines.csv has the accelerators of each machine.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from google.cloud import aiplatform_v1

from launcher.testing.googlecloud.compute.instance_checks import GPU_SERIES
from launcher.testing.googlecloud.wire import ApiError, Violation

REQUIRED = "Required field is not set."
LABELS = (
    "There can be no more than 64 labels attached to a single resource. Label keys and values can only contain "
    "lowercase letters, numbers, dashes and underscores. Label keys must start with a letter or number, must be less "
    "than 64 characters in length, and must be less that 128 bytes in length when encoded in UTF-8. Label values must "
    "be less than 64 characters in length, and must be less that 128 bytes in length when encoded in UTF-8."
)
BOTH_OR_NONE = "Both `accelerator_type` and `accelerator_count` should be specified or none."
BOOT_DISKS = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
FLEX_START_GPUS = ("NVIDIA_L4", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100", "NVIDIA_H200", "NVIDIA_B200")
WEEK = 7 * 24 * 3600


def check(job: Any) -> None:
    """Raise ApiError 400 if Vertex would reject `job` (a protobuf CustomJob)."""
    violations = [*_job(job), *_scheduling(job.job_spec)]
    if violations:  # the format was seen in answers of Vertex AI
        listed = [f"{n}.Field: {field}; Message: {message}" for n, (field, message) in enumerate(violations, 1)]
        raise ApiError(400, "\t".join(["List of found errors:", *listed, ""]), violations=tuple(violations))
    for pool in job.job_spec.worker_pool_specs:
        if _used(pool):
            _machine(pool.machine_spec)


def _job(job: Any) -> Iterator[Violation]:
    if not job.display_name:
        yield Violation("display_name", REQUIRED)
    if len(job.display_name) > 128:
        yield Violation("display_name", "The display name must be at most 128 characters long.")
    if len(job.labels) > 64 or not all(map(_label, job.labels, job.labels.values())):
        yield Violation("custom_job.labels", LABELS)
    pools = job.job_spec.worker_pool_specs
    if not pools or not _used(pools[0]):
        yield Violation("job_spec.worker_pool_specs", REQUIRED)
    elif pools[0].replica_count > 1:
        field = "job_spec.worker_pool_specs[0].replica_count"
        yield Violation(field, "The primary worker pool must have exactly one replica.")
    for n, pool in enumerate(pools):
        if _used(pool):
            yield from _pool(pool, f"job_spec.worker_pool_specs[{n}]")


def _pool(pool: Any, path: str) -> Iterator[Violation]:
    machine, disk = pool.machine_spec, pool.disk_spec
    if not machine.machine_type:
        yield Violation(f"{path}.machine_spec.machine_type", REQUIRED)
    if bool(machine.accelerator_type) != bool(machine.accelerator_count):
        yield Violation(f"{path}.machine_spec.accelerator_type", BOTH_OR_NONE)
    if pool.replica_count < 1:
        yield Violation(f"{path}.replica_count", REQUIRED)
    if disk.boot_disk_type and disk.boot_disk_type not in BOOT_DISKS:
        yield Violation(f"{path}.disk_spec.boot_disk_type", f"Must be one of {', '.join(BOOT_DISKS)}.")
    if disk.boot_disk_size_gb and not 100 <= disk.boot_disk_size_gb <= 64000:
        yield Violation(f"{path}.disk_spec.boot_disk_size_gb", "Must be between 100 and 64000.")
    task = pool.WhichOneof("task")
    if task is None:
        yield Violation(f"{path}.container_spec", REQUIRED)
    else:
        yield from _task(getattr(pool, task), f"{path}.{task}")
    for kind, needed in (("nfs_mounts", "server path mount_point"), ("lustre_mounts", LUSTRE)):
        for n, mount in enumerate(getattr(pool, kind)):
            yield from _required(mount, needed, f"{path}.{kind}[{n}]")


LUSTRE = "instance_ip volume_handle filesystem mount_point"


def _task(task: Any, path: str) -> Iterator[Violation]:
    container = path.endswith("container_spec")
    yield from _required(task, "image_uri" if container else "executor_image_uri package_uris python_module", path)
    if len(task.env) > 100:
        yield Violation(f"{path}.env", "There can be no more than 100 environment variables.")
    names = [variable.name for variable in task.env]
    if len(names) != len(set(names)):
        yield Violation(f"{path}.env", "EnvVar names must be unique.")
    for n, variable in enumerate(task.env):
        yield from _required(variable, "name value", f"{path}.env[{n}]")


def _required(message: Any, names: str, path: str) -> Iterator[Violation]:
    for name in names.split():
        if not getattr(message, name):
            yield Violation(f"{path}.{name}", REQUIRED)


def _scheduling(spec: Any) -> Iterator[Violation]:
    scheduling = spec.scheduling
    if scheduling.strategy != aiplatform_v1.Scheduling.Strategy.FLEX_START:
        return
    if not 0 <= scheduling.timeout.seconds <= WEEK:
        yield Violation("job_spec.scheduling.timeout", "FLEX_START jobs may run for at most 7 days.")
    machines = [pool.machine_spec for pool in spec.worker_pool_specs if _used(pool)]
    if any(machine != machines[0] for machine in machines):
        yield Violation("job_spec.worker_pool_specs", "FLEX_START needs the same machine in all worker pools.")
    for machine in machines:
        gpu = aiplatform_v1.AcceleratorType(machine.accelerator_type).name
        if not gpu.startswith(FLEX_START_GPUS):
            yield Violation("job_spec.scheduling.strategy", f'FLEX_START is not supported for accelerator "{gpu}".')


def _machine(machine: Any) -> None:
    """Check the pair of machine and accelerator. Vertex reports it as one sentence without a list."""
    name, count = machine.machine_type, machine.accelerator_count
    gpu = aiplatform_v1.AcceleratorType(machine.accelerator_type).name
    rows = [row for row in _machines() if fnmatchcase(name, row["machine_type"])]
    known = {row["accelerator"]: [*map(int, row["counts"].split())] for row in rows if row["accelerator"]}
    if not rows:
        raise ApiError(400, f'Machine type "{name}" is not supported.')
    if not count and not name.startswith(GPU_SERIES):  # the A and G series always have accelerators
        return
    if gpu not in known:
        raise ApiError(400, f'Accelerator "{gpu}" is not supported for machine type "{name}".')
    if count not in known[gpu]:
        counts = ", ".join(map(str, sorted(known[gpu])))
        raise ApiError(400, f'"{count}" of accelerator "{gpu}" is not supported for machine type "{name}": {counts}.')


def _used(pool: Any) -> bool:
    """Return whether a pool is used. A skipped pool is an empty message."""
    return bool(pool.ByteSize())


def _label(key: str, value: str) -> bool:
    """Return whether a label is valid. Letters of alphabets without case count as lower case."""
    legal = re.fullmatch(r"[\w-]{1,63}", key) and re.fullmatch(r"[\w-]{0,63}", value)
    return bool(legal) and key[0] not in "-_" and key + value == (key + value).lower()


@cache
def _machines() -> list[dict[str, str]]:
    """Return the rows of machines.csv: machine type (a glob), accelerator and its counts, empty without one."""
    lines = Path(__file__).with_name("machines.csv").read_text(encoding="utf-8").splitlines()
    return [*csv.DictReader(line for line in lines if not line.startswith("#"))]

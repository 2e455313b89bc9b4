"""Node on a Compute Engine VM: preemption notices and Cloud Logging, which on Vertex AI the platform provides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launch_train.common import contract
from launch_train.node.cluster import ClusterError, parse
from launch_train.node.generation import StopRequest
from launch_train.node.preemption import PreemptionListener
from launch_train.telemetry.cloud_logging import LogSource, LogUploader

Say = Callable[[str], None]


@dataclass(frozen=True)
class VmIdentity:
    """A VM. `instance` is its numeric id in Compute Engine, which is never reused."""

    project: str
    zone: str
    name: str
    instance: str


def watch_vm(environ: Mapping[str, str], stop: StopRequest, say: Say) -> LogUploader | None:
    """On a VM, treat its preemption as SIGTERM and return the uploader of its log lines to Cloud Logging.

    Returns None without a VM, and without a run folder, where output isn't kept.
    """
    machine = machine_of(environ, say)
    if machine is None:
        return None
    PreemptionListener(environ, stop, say).start()
    if not environ.get(contract.RUN_FOLDER):
        return None
    return LogUploader(log_source(machine, environ), environ, say)


def machine_of(environ: Mapping[str, str], say: Say) -> VmIdentity | None:
    """Return the VM of contract.MACHINE; None if it isn't set, or can't be parsed. The latter only costs extras, so it
    is reported and doesn't end the run."""
    text = environ.get(contract.MACHINE)
    if not text:
        return None
    try:
        described = json.loads(text)
        return VmIdentity(*(str(described[name]) for name in ("project", "zone", "name", "instance")))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        say(f"{contract.MACHINE} is invalid ({kind}: {error}): no preemption notices, no Cloud Logging")
        return None


def log_source(machine: VmIdentity, environ: Mapping[str, str]) -> LogSource:
    """Return the resource and labels of this node's log entries."""
    try:
        node = parse(environ.get(contract.CLUSTER_SPEC), environ).node
    except ClusterError:  # reported elsewhere
        node = 0
    resource = {"project_id": machine.project, "instance_id": machine.instance, "zone": machine.zone}
    labels = {
        contract.LOG_RUN: environ.get(contract.RUN, ""),
        contract.LOG_TASK: contract.task_name(node),
        "compute.googleapis.com/resource_name": machine.name,  # under which Google's own agents write the VM's name
    }
    return LogSource(machine.project, resource, {name: value for name, value in labels.items() if value})

"""The Compute Engine VM that a node is: what the platform does on Vertex AI, the node does there for itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launch_train.common import contract
from launch_train.node.cluster import ClusterError, parse
from launch_train.node.launch_round import Stop
from launch_train.node.preemption import Notices
from launch_train.telemetry.cloud_logging import Journal
from launch_train.telemetry.log_entry import Source

Say = Callable[[str], None]


@dataclass(frozen=True)
class Machine:
    """The VM. `instance` is its number in Compute Engine, which no other VM will ever have."""

    project: str
    zone: str
    name: str
    instance: str


def attend(environ: Mapping[str, str], stop: Stop, say: Say) -> Journal | None:
    """On a VM: from now on its end is a signal to stop, and what is added to the journal goes to Cloud Logging. None
    where there is no VM, or nothing is kept of what is printed (no run folder)."""
    machine = machine_of(environ, say)
    if machine is None:
        return None
    Notices(environ, stop, say).start()
    if not environ.get(contract.RUN_FOLDER):
        return None
    return Journal(source_of(machine, environ), environ, say)


def machine_of(environ: Mapping[str, str], say: Say) -> Machine | None:
    """The VM of contract.MACHINE; None where there is none. One that can't be read is told, and no reason to end a
    run: all that follows from it is an extra."""
    text = environ.get(contract.MACHINE)
    if not text:
        return None
    try:
        told = json.loads(text)
        return Machine(*(str(told[name]) for name in ("project", "zone", "name", "instance")))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        say(f"{contract.MACHINE} can't be read ({kind}: {error}): no notice of a preemption, nothing in Cloud Logging")
        return None


def source_of(machine: Machine, environ: Mapping[str, str]) -> Source:
    """What each log entry of this node says of where it comes from."""
    try:
        node = parse(environ.get(contract.CLUSTER_SPEC), environ).node
    except ClusterError:  # somebody else says so
        node = 0
    resource = {"project_id": machine.project, "instance_id": machine.instance, "zone": machine.zone}
    labels = {
        contract.LOG_RUN: environ.get(contract.RUN, ""),
        contract.LOG_TASK: contract.task_name(node),
        "compute.googleapis.com/resource_name": machine.name,  # under which Google's own agents write the VM's name
    }
    return Source(machine.project, resource, {name: value for name, value in labels.items() if value})

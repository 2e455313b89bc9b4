"""Find a VM by name, number or resource name, and explain a change that Compute Engine refuses."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import launcher.clock
from launcher.cli.ui.streams import say
from launcher.diagnosis import RequestContext, diagnose_refusal, error_of
from launcher.errors import LaunchError, NoCapacity, UnreachableError, UsageError
from launcher.inputs.gather import project
from launcher.jobs.job import RUN_LABEL
from launcher.jobs.vm import VmInstance
from launcher.services.base import CreateRefused
from launcher.services.compute.client import Compute, Fleet
from launcher.text import did_you_mean, near

RESOURCE = re.compile(
    r"(?:https://[\w.]+/compute/v1/)?(?:projects/(?P<project>[^/]+)/)?zones/(?P<zone>[a-z0-9-]+)/instances/(?P<name>[^/]+)"
)
OURS = f"labels.{RUN_LABEL}:*"
LIST = "launch vm list shows all VMs."


def open_compute() -> Compute:
    """Return the Compute Engine client of gcloud's project. Raises UsageError: none is set."""
    return Compute(project("vm", os.environ), os.environ, launcher.clock.REAL, notice=say)


class NoSuchVm(UsageError):
    """No VM has this name or a similar one."""


def display_time(compute: Compute) -> float:
    """Return Google's time for display, or this machine's if Google's is not available."""

    try:
        return compute.google_now()
    except LaunchError:
        return time.time()


# --- Look up one VM --------------------------------------------------------------------------------------------------


def one_machine(compute: Compute, text: str, zone: str | None = None) -> VmInstance:
    """Return launch's VM with a name, number or resource name.

    Raises:
        UsageError: none exists, or several have that name.
        UnreachableError: none exists in the zones that could be read.
        LaunchError: no zone could be read.
    """
    name, zone = parse_name(text, zone, compute.project)
    fleet = compute.instances(OURS)
    ours = [machine for machine in fleet.machines if machine.run]
    named = [machine for machine in ours if name in (machine.name, machine.id) and zone in (None, machine.zone)]
    if len(named) == 1:
        return named[0]
    if named:
        places = ", ".join(machine.zone for machine in named)
        raise UsageError(f"{len(named)} VMs are named {name}: in {places}", f"Choose one: --zone {named[0].zone}")
    raise vm_not_found(name, zone, ours, fleet, compute)


def parse_name(text: str, zone: str | None, project: str) -> tuple[str, str | None]:
    """Return a VM's name or number, and its zone if given. Raises UsageError: it is in another project."""
    match = RESOURCE.fullmatch(text)
    if not match:
        return text, zone
    if match["project"] not in (None, project):
        raise UsageError(f"{text} is not in project {project}", f"gcloud config set project {match['project']}")
    return match["name"], match["zone"]


def vm_not_found(name: str, zone: str | None, ours: Sequence[VmInstance], fleet: Fleet, compute: Compute) -> Exception:
    """Return the error for a VM that was not found, or that may be in a zone that could not be read."""
    where = f"in {zone}" if zone else f"in project {compute.project}"
    if unread := [place for place in fleet.unread if zone in (None, place)]:
        return UnreachableError(
            f"no VM {name} was found {where}, but {', '.join(unread)} could not be read", "Try again in a moment."
        )
    elsewhere = sorted({machine.zone for machine in ours if name in (machine.name, machine.id)})
    if elsewhere:
        return UsageError(f"no VM {name} {where}", f"It is in {', '.join(elsewhere)}.")
    if close := near(name, sorted({machine.name for machine in ours}), most=3):
        return UsageError(f"no VM {name} {where}", f"{did_you_mean(close)} {LIST}")
    return NoSuchVm(f"no VM {name} {where}", LIST)


def check_workstation(machine: VmInstance, problem: str, hint: str = "") -> VmInstance:
    """Return the VM if it is one to work on. Raises UsageError with `problem`: it runs a job."""
    if machine.trains:
        hint = hint or f"launch cancel {machine.run} saves a checkpoint and ends the run"
        raise UsageError(f"{machine.name} runs the job of {machine.run}: {problem}", hint)
    return machine


@contextmanager
def explained_vm_errors(machine: VmInstance) -> Iterator[None]:
    """Explain a change of a VM that Compute Engine refuses, and after Ctrl-C that the operation continues.

    Raises LaunchError.
    """
    try:
        yield
    except CreateRefused as error:
        raise refusal_error(error, machine) from error
    except KeyboardInterrupt as stop:
        text = f"the operation continues\nlaunch vm status {machine.name} shows its progress"
        stop.add_note(text)
        say(f"interrupted; {text}")
        raise


def refusal_error(error: CreateRefused, machine: VmInstance) -> LaunchError:
    context = RequestContext(
        project=machine.project,
        region=machine.region,
        provisioning=machine.provisioning,
        zone=machine.zone,
        machine_type=machine.machine_type,
    )
    diagnosis = diagnose_refusal(error.refusal, context)
    if diagnosis.kind == "stockout":  # a stopped VM can only start in the zone of its disk
        named = f" (Compute Engine names {', '.join(diagnosis.zones)})" if diagnosis.zones else ""
        return NoCapacity(
            f"{machine.zone}, where the disk of {machine.name} is, has no capacity for {machine.machine_type}",
            f"launch vm start {machine.name}\n    tries again later\n"
            f"launch vm --name NAME --zone ZONE …\n    creates a VM in another zone{named}; to copy this VM's disk:\n"
            f"    gcloud compute machine-images create NAME --source-instance={machine.name} "
            f"--source-instance-zone={machine.zone}",
        )
    return error_of(diagnosis)(f"{machine.name}: {diagnosis.cause}", diagnosis.fix)

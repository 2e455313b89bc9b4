"""VMs that are in the cloud, found by what a person types."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import launcher.clock
from launcher.errors import LaunchError, UsageError
from launcher.jobs.job import RUN_LABEL
from launcher.text import did_you_mean, near

if TYPE_CHECKING:
    from launcher.compute.client import Compute, Fleet
    from launcher.jobs.vm import Machine

RESOURCE = re.compile(
    r"(?:https://[\w.]+/compute/v1/)?(?:projects/(?P<project>[^/]+)/)?zones/(?P<zone>[a-z0-9-]+)/instances/(?P<name>[^/]+)"
)
OURS = f"labels.{RUN_LABEL}:*"
LIST = "launch vm list shows all that there are."


def open_compute() -> Compute:
    """Compute Engine for gcloud's own project. Raises UsageError: none is set."""
    from launcher.cli.gather import project
    from launcher.compute.client import Compute

    return Compute(project("vm", os.environ), os.environ, launcher.clock.REAL, notice=say)


def say(text: str) -> None:
    """A line of launch's own, or several, beside the result."""
    for line in text.splitlines():
        print(f"launch: {line}", file=sys.stderr, flush=True)


class NoSuchVm(UsageError):
    """There is no such VM, nor one with a name like that."""


def shown_now(compute: Compute) -> float:
    """Google's time for what is shown; this machine's where that can't be asked: what was done is done."""
    from launcher.compute.lifecycle import google_now

    try:
        return google_now(compute)
    except LaunchError:
        return time.time()


# --- Which one is meant ----------------------------------------------------------------------------------------------


def one_machine(compute: Compute, text: str, zone: str | None = None) -> Machine:
    """The VM that is meant by its name, number or resource name; launch's own alone.

    Raises:
        UsageError: there is none, or several have that name.
        UnreachableError: there is none in the zones that could be read.
        LaunchError: no zone could be read.
    """
    name, zone = named(text, zone, compute.project)
    fleet = compute.instances(OURS)
    ours = [machine for machine in fleet.machines if machine.run]
    found = [one for one in ours if name in (one.name, one.id) and zone in (None, one.zone)]
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(machine.zone for machine in found)
        raise UsageError(f"{len(found)} VMs are called {name}: in {places}", f"Say which: --zone {found[0].zone}")
    raise missing(name, zone, ours, fleet, compute)


def named(text: str, zone: str | None, project: str) -> tuple[str, str | None]:
    """A VM's name or number, and its zone where that was said. Raises UsageError: it is another project's."""
    found = RESOURCE.fullmatch(text)
    if not found:
        return text, zone
    if found["project"] not in (None, project):
        raise UsageError(
            f"{text} is a VM of another project than {project}", f"gcloud config set project {found['project']}"
        )
    return found["name"], found["zone"]


def missing(name: str, zone: str | None, ours: Sequence[Machine], fleet: Fleet, compute: Compute) -> Exception:
    """That there is no such VM, or that it can't be said."""
    from launcher.gcp.api import UnreachableError

    where = f"in {zone}" if zone else f"in project {compute.project}"
    if unread := [place for place in fleet.unread if zone in (None, place)]:
        return UnreachableError(
            f"no VM {name} was found {where}, but {', '.join(unread)} couldn't be read", "Try again in a moment."
        )
    elsewhere = sorted({machine.zone for machine in ours if name in (machine.name, machine.id)})
    if elsewhere:
        return UsageError(f"there is no VM {name} {where}", f"It is in {', '.join(elsewhere)}.")
    if close := near(name, sorted({machine.name for machine in ours}), most=3):
        return UsageError(f"launch has no VM {name} {where}", f"{did_you_mean(close)} {LIST}")
    return NoSuchVm(f"launch has no VM {name} {where}", LIST)


def tell_unread(unread: Mapping[str, str]) -> None:
    """The zones that couldn't be read, those alike together."""
    alike: dict[str, list[str]] = {}
    for zone, why in unread.items():
        alike.setdefault(why, []).append(zone)
    for why, zones in alike.items():
        say(f"{', '.join(zones)} couldn't be read: {why}")


def of_work(machine: Machine, but: str, hint: str = "") -> Machine:
    """The VM, if it is one to work on; else UsageError says what doesn't happen to one that trains."""
    if machine.trains:
        hint = hint or f"launch cancel {machine.run} ends the run, after it has saved"
        raise UsageError(f"{machine.name} trains for {machine.run}: {but}", hint)
    return machine


@contextmanager
def waited_for(machine: Machine) -> Iterator[None]:
    """Ctrl-C takes nothing back: what Compute Engine has begun goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(f"what was begun goes on\nlaunch vm status {machine.name} shows how far it is")
        say(f"interrupted; what was begun goes on\nlaunch vm status {machine.name} shows how far it is")
        raise

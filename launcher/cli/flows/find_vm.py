"""VMs that are in the cloud, found by what a person types; and what one costs and when it stops, in a line."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING

import launcher.clock
from launcher.errors import LaunchError, UsageError
from launcher.jobs.job import RUN_LABEL

if TYPE_CHECKING:
    from launcher.catalog import Price
    from launcher.compute.client import Compute, Fleet
    from launcher.jobs.vm import Machine

RESOURCE = re.compile(
    r"(?:https://[\w.]+/compute/v1/)?(?:projects/(?P<project>[^/]+)/)?zones/(?P<zone>[a-z0-9-]+)/instances/(?P<name>[^/]+)"
)
OURS = f"labels.{RUN_LABEL}:*"
LIST = "launch vm list shows all that there are."
STATES = {"TERMINATED": "STOPPED"}
"""Google's word for it, and ours where that says more."""


def open_compute() -> Compute:
    """Compute Engine for gcloud's own project. Raises UsageError: none is set."""
    from launcher.cli.gather import project
    from launcher.compute.client import Compute

    return Compute(project("vm", os.environ), os.environ, launcher.clock.REAL, notice=say)


def state_text(machine: Machine) -> str:
    """`RUNNING`, `STOPPED` …"""
    return STATES.get(machine.status, machine.status)


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
    if near := get_close_matches(name, sorted({machine.name for machine in ours}), n=3):
        return UsageError(f"launch has no VM {name} {where}", f"Did you mean {' or '.join(near)}? {LIST}")
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


# --- What it costs and when it stops ---------------------------------------------------------------------------------


def leased(machine: Machine, price: Price, now: float) -> str:
    """`$2.00/h, at most $24.00, stops itself 22:40`; with a lease that ends before Google itself ends the VM also what
    it costs by then. The most is since its last start, by the limit that Google keeps."""
    parts = [price_text(price)]
    limit = machine.limit_seconds
    if price.usd is not None and limit:
        parts.append(f"at most {usd_text(price.usd * limit / 3600, price.approx)}")
    until, ceiling = machine.lease_until, machine.ceiling
    if until is None:
        return ", ".join([*parts, unstarted(machine)])
    if until < now:
        return ", ".join([*parts, f"should have ended {clock_text(until, now)}"])
    ends = f"{ends_itself(machine)} {clock_text(until, now)}"
    if price.usd is not None and machine.started is not None and (ceiling is None or until < ceiling):
        ends += f" ({usd_text(price.usd * (until - machine.started) / 3600, price.approx)} by then)"
    return ", ".join([*parts, ends])


def unstarted(machine: Machine) -> str:
    """When it stops itself, of a VM whose time doesn't run."""
    own = machine.parameters.get("lease_seconds")
    known = [float(seconds) for seconds in (own, machine.limit_seconds) if seconds]
    if not known:
        return "nothing stops it"
    return f"{ends_itself(machine)} {span_text(min(known))} after its start"


def ends_itself(machine: Machine) -> str:
    """What happens at the end of its lease."""
    scheduling = machine.request.get("scheduling", {})
    how = machine.parameters.get("on_stop") or scheduling.get("instanceTerminationAction", "stop")
    return "deletes itself" if how.lower() == "delete" else "stops itself"


def price_text(price: Price) -> str:
    """`≈$2.00/h`, or that it is unknown."""
    return "price unknown" if price.usd is None else f"{usd_text(price.usd, price.approx)}/h"


def usd_text(usd: float, approx: bool = False) -> str:
    """`≈$24.00`."""
    return f"{'≈' if approx else ''}${usd:,.2f}"


def clock_text(at: float, now: float) -> str:
    """`22:40` by this machine's time zone, with the day when it is another one: `Sun 06:40`, `28 Nov 06:40`."""
    there, here = (datetime.fromtimestamp(seconds, UTC).astimezone() for seconds in (at, now))
    days = (there.date() - here.date()).days
    day = "" if not days else "%a " if abs(days) < 7 else "%-d %b "
    return there.strftime(f"{day}%H:%M")


def span_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h`, `26 d`: one unit is enough to tell how old something is."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} d"

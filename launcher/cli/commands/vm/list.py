"""`launch vm list`: list launch's VMs in all zones."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from launcher.cli.flows.find_vm import OURS, open_compute
from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import Mine, Output, OutputFormat
from launcher.cli.ui.data import machine_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import WIDTH, columns, fit_columns, local_moment, wrapped
from launcher.cli.ui.vm_text import vm_state
from launcher.errors import LaunchError, UsageError
from launcher.gcp.parallel import together
from launcher.inputs.gcloud_config import person
from launcher.jobs.orphans import Disk, orphan_reason, without_vm
from launcher.jobs.vm import DOWN, VmInstance
from launcher.plan.names import is_owned_by
from launcher.services.compute.client import Compute
from launcher.services.compute.job_state import Record, training_end
from launcher.services.compute.vm_cost import disks_of, disks_usd_per_month, price_of, usd_so_far, vm_usd_per_month
from launcher.text import rough_duration, usd_text

LESS = {"ENDS": ", ", "MACHINE": ", ", "AGE": "", "$/H": ""}
"""Columns shortened or dropped if the list is too wide, in this order (`fit_columns`)."""


def vm_list(
    *,
    orphans: Annotated[
        bool,
        option(OUTPUT, "--orphans", help="List only unneeded resources that cost money."),
    ] = False,
    mine: Mine = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """List launch's VMs, in all zones.

    Finds them by their labels. $/H and COST exclude the disk and count from the last start. A stopped VM costs only its
    disk.
    """

    compute = open_compute()
    machines, disks, now = read_inventory(compute)
    if mine:
        machines = [machine for machine in machines if is_mine(machine.labels)]
        disks = [disk for disk in disks if is_mine(disk.labels)]
    if orphans:
        idle = [*of_machines(machines, disks, now, ends_of(machines)), *of_disks(disks, machines, compute.project)]
        orphans_data = [dict(msgspec.to_builtins(orphan)) for orphan in idle]
        printed({"orphans": orphans_data}, output_format, page=orphan_lines(idle))
        return
    rows = [vm_row(machine, disks, now) for machine in machines]
    rows = fit_columns(rows, max(WIDTH, shutil.get_terminal_size().columns), LESS) if rows else []
    lines = columns([list(rows[0]), *(list(row.values()) for row in rows)]) if rows else ["No VMs."]
    printed({"machines": [machine_data(machine, disks, now) for machine in machines]}, output_format, page=lines)


def is_mine(labels: Mapping[str, str]) -> bool:
    """Return whether the owner label names gcloud's account. Raises UsageError: gcloud has none."""
    if account := person(os.environ):
        return is_owned_by(labels, account)
    raise UsageError("--mine needs gcloud's account, and none is set", "gcloud auth login")


def read_inventory(compute: Compute) -> tuple[Sequence[VmInstance], Sequence[Disk], float]:
    """Return launch's VMs, newest first, its disks, and Google's time; print what could not be read.

    Raises LaunchError: the VMs cannot be listed.
    """
    calls: dict[str, Callable[[], Any]] = {
        "fleet": lambda: compute.instances(OURS),
        "stock": lambda: compute.disks(OURS),
        "now": compute.google_now,
    }
    answers = together(calls)
    fleet, kept, now = answers["fleet"], answers["stock"], answers["now"]
    if isinstance(fleet, LaunchError):
        raise fleet
    if isinstance(kept, LaunchError):
        say(f"cannot read the disks: {kept.problem}")
    zones_by_reason: dict[str, list[str]] = {}
    for zone, why in {**({} if isinstance(kept, LaunchError) else kept.unread), **fleet.unread}.items():
        zones_by_reason.setdefault(why, []).append(zone)
    for why, zones in zones_by_reason.items():
        say(f"{', '.join(zones)} could not be read: {why}")
    machines = [machine for machine in fleet.machines if machine.run]
    disks = () if isinstance(kept, LaunchError) else kept.disks
    return machines, disks, time.time() if isinstance(now, LaunchError) else now


# --- The table -------------------------------------------------------------------------------------------------------


def vm_row(machine: VmInstance, disks: Iterable[Disk], now: float) -> dict[str, str]:
    """Return a VM's cells by column."""
    price = price_of(machine)
    return {
        "NAME": machine.name,
        "STATE": vm_state(machine),
        "MACHINE": f"{machine.machine_type}, {machine.provisioning}",
        "ZONE": machine.zone,
        "AGE": rough_duration(now - machine.created),
        "$/H": "?" if price.usd is None else f"{'≈' if price.approx else ''}{price.usd:,.2f}",
        "COST": vm_cost_text(machine, disks, now),
        "ENDS": ends_text(machine, now),
    }


def vm_cost_text(machine: VmInstance, disks: Iterable[Disk], now: float) -> str:
    """Return `≈$4.10` so far, or `$20/month` for the disk of a stopped VM."""
    if machine.status in DOWN:
        own = disks_of(machine, disks)
        usd = disks_usd_per_month(own) if own else None
        return "?" if usd is None else f"${usd:,.0f}/month"
    price = price_of(machine)
    usd = usd_so_far(machine, price, now)
    return "?" if usd is None else usd_text(usd, price.approx and usd > 0)


def ends_text(machine: VmInstance, now: float) -> str:
    """Return `22:40, in 3 h`, or `-` for a VM that is not running or has no end."""
    until = machine.lease_until
    if until is None:
        return "-"
    left = f"in {rough_duration(until - now)}" if until > now else "overdue"
    return f"{local_moment(until, now)}, {left}"


class Orphan(Struct, frozen=True, kw_only=True):
    """An unneeded VM or disk, why it is unneeded, its monthly cost (None: unknown), and the command that removes it.

    `because` is the error with which a VM that ran a job failed to delete itself.
    """

    what: str
    name: str
    zone: str
    about: str
    why: str
    usd_per_month: float | None
    remove: str
    because: str = ""


def ends_of(machines: Sequence[VmInstance]) -> dict[str, Record]:
    """Return how the jobs of VMs ended, by VM number; print the run folders that could not be read."""
    training = {machine.id: machine for machine in machines if machine.trains}
    ends = {}
    for number, answer in together(
        {number: partial(training_end, machine) for number, machine in training.items()}
    ).items():
        if isinstance(answer, LaunchError):
            say(f"cannot check whether {training[number].name} has ended: {answer.problem}")
        elif answer is not None:
            ends[number] = answer
    return ends


def of_machines(
    machines: Sequence[VmInstance], disks: Sequence[Disk], now: float, ends: Mapping[str, Record]
) -> Iterator[Orphan]:
    for machine in machines:
        end = ends.get(machine.id)
        if why := orphan_reason(machine, now, end.ended if end else None):
            yield Orphan(
                what="vm",
                name=machine.name,
                zone=machine.zone,
                about=f"{machine.machine_type} {machine.provisioning}, {vm_state(machine)}",
                why=why,
                because=end.cleanup if end else "",
                usd_per_month=vm_usd_per_month(machine, disks_of(machine, disks)),
                remove=removal(machine, has_ended=end is not None),
            )


def removal(machine: VmInstance, *, has_ended: bool) -> str:
    """Return the command that removes a VM."""
    if machine.trains and not has_ended:
        return f"launch cancel {machine.run}"
    return f"launch vm delete {machine.name} --zone {machine.zone}"


def of_disks(disks: Sequence[Disk], machines: Sequence[VmInstance], project: str) -> Iterator[Orphan]:
    for disk in without_vm(disks, machines):
        yield Orphan(
            what="disk",
            name=disk.name,
            zone=disk.zone,
            about=f"disk, {disk.size_gb} GB {disk.kind}",
            why="not attached to any VM",
            usd_per_month=disks_usd_per_month([disk]),
            remove=f"gcloud compute disks delete {disk.name} --zone={disk.zone} --project={project}",
        )


def orphan_lines(orphans: Sequence[Orphan]) -> Iterator[str]:
    """Yield the page: three lines per orphan; commands are not wrapped, to be copied."""
    if not orphans:
        yield "No orphaned resources found."
        return
    for orphan in orphans:
        costs = (
            "price unknown"
            if orphan.usd_per_month is None
            else f"{usd_text(orphan.usd_per_month, approx=True)} a month"
        )
        yield f"{orphan.name}  {orphan.about} in {orphan.zone}"
        yield f"    {orphan.why}; {costs}"
        yield from (f"    {wrapped(line, 9 * len(line))[0]}" for line in orphan.because.splitlines() if line)
        yield f"    {orphan.remove}"
    known = [orphan.usd_per_month for orphan in orphans if orphan.usd_per_month is not None]
    if len(known) > 1:
        yield f"total {usd_text(sum(known), approx=True)} a month"

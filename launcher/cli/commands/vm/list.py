"""`launch vm list`: list launch's VMs in all zones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import Mine, Output, OutputFormat
from launcher.cli.ui.text import columns, fit_columns

if TYPE_CHECKING:
    from launcher.jobs.orphans import Disk
    from launcher.jobs.vm import VmInstance
    from launcher.services.compute.client import Compute

WIDTH = 80
"""Columns of the list, unless the terminal is wider."""
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
    import shutil

    from launcher.cli.commands.vm.orphans import show_orphans
    from launcher.cli.flows.find_vm import open_compute
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed

    compute = open_compute()
    machines, disks, now = read_inventory(compute)
    if mine:
        machines = [machine for machine in machines if is_mine(machine.labels)]
        disks = [disk for disk in disks if is_mine(disk.labels)]
    if orphans:
        show_orphans(compute, machines, disks, now, output_format)
        return
    lines = vm_table(machines, disks, now, max(WIDTH, shutil.get_terminal_size().columns))
    printed({"machines": [machine_data(machine, disks, now) for machine in machines]}, output_format, page=lines)


def is_mine(labels: Mapping[str, str]) -> bool:
    """Return whether the owner label names gcloud's account. Raises UsageError: gcloud has none."""
    from launcher.errors import UsageError
    from launcher.inputs.gcloud_config import person
    from launcher.plan.names import is_owned_by

    if account := person(os.environ):
        return is_owned_by(labels, account)
    raise UsageError("--mine needs gcloud's account, and none is set", "gcloud auth login")


def read_inventory(compute: Compute) -> tuple[Sequence[VmInstance], Sequence[Disk], float]:
    """Return launch's VMs, newest first, its disks, and Google's time; print what could not be read.

    Raises LaunchError: the VMs cannot be listed.
    """
    from launcher.cli.flows.find_vm import OURS
    from launcher.cli.ui.streams import say
    from launcher.errors import LaunchError
    from launcher.gcp.parallel import together

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


def vm_table(machines: Sequence[VmInstance], disks: Iterable[Disk], now: float, width: int) -> Iterator[str]:
    """Yield the list in `width` columns, if the names are short enough."""
    if not machines:
        yield "No VMs."
        return
    rows = fit_columns([vm_row(machine, disks, now) for machine in machines], width, LESS)
    yield from columns([list(rows[0]), *(list(row.values()) for row in rows)])


def vm_row(machine: VmInstance, disks: Iterable[Disk], now: float) -> dict[str, str]:
    """Return a VM's cells by column."""
    from launcher.cli.ui.vm_text import vm_state
    from launcher.services.compute.vm_cost import price_of
    from launcher.text import rough_duration

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
    from launcher.jobs.vm import DOWN
    from launcher.services.compute.vm_cost import disks_of, disks_usd_per_month, price_of, usd_so_far
    from launcher.text import usd_text

    if machine.status in DOWN:
        own = disks_of(machine, disks)
        usd = disks_usd_per_month(own) if own else None
        return "?" if usd is None else f"${usd:,.0f}/month"
    price = price_of(machine)
    usd = usd_so_far(machine, price, now)
    return "?" if usd is None else usd_text(usd, price.approx and usd > 0)


def ends_text(machine: VmInstance, now: float) -> str:
    """Return `22:40, in 3 h`, or `-` for a VM that is not running or has no end."""
    from launcher.cli.ui.text import local_moment
    from launcher.text import rough_duration

    until = machine.lease_until
    if until is None:
        return "-"
    left = f"in {rough_duration(until - now)}" if until > now else "overdue"
    return f"{local_moment(until, now)}, {left}"

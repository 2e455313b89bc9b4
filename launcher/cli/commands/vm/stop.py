"""`launch vm stop`: a VM that costs no more than its disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.options import InZone, Output, OutputFormat, VmName

if TYPE_CHECKING:
    from launcher.compute.client import Compute
    from launcher.jobs.orphans import Disk
    from launcher.jobs.vm import Machine

STOPPED = frozenset({"STOPPED", "TERMINATED"})
STOPPING = frozenset({"STOPPING", "PENDING_STOP"})


def vm_stop(
    name: VmName,
    *,
    zone: InZone = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Stop a VM and wait until it has stopped.

    Its boot disk is kept and billed. Data on its local SSDs (/mnt/localssd) is lost.
    """
    from launcher.cli.flows.find_vm import of_work, one_machine, open_compute

    compute = open_compute()
    machine = of_work(one_machine(compute, name, zone), "it isn't stopped by hand")
    if machine.status in STOPPED:
        show(compute, machine, output_format, "is stopped already")
        return
    show(compute, stopped(compute, machine), output_format, "is stopped")


def stopped(compute: Compute, machine: Machine) -> Machine:
    """The VM once it is stopped. Raises LaunchError."""
    from launcher.backend.base import CreateRefused
    from launcher.cli.flows.find_vm import say, waited_for
    from launcher.cli.flows.vm_errors import explained
    from launcher.compute.lifecycle import change_and_wait, wait_for_status
    from launcher.compute.vm_cost import has_local_ssd

    discard = has_local_ssd(machine)
    with waited_for(machine):
        if machine.status in STOPPING:
            say(f"{machine.name} is being stopped already")
            return wait_for_status(compute, machine, STOPPED, say)
        say(f"stopping {machine.name}{': what lies on /mnt/localssd is lost' if discard else ''}")
        try:
            return change_and_wait(
                compute, machine, lambda: compute.stop(machine, discard_local_ssd=discard), STOPPED, say
            )
        except CreateRefused as error:
            raise explained(error, machine) from error


def show(compute: Compute, machine: Machine, output: Output, how: str) -> None:
    """The VM, what it goes on to cost, and how to start it again."""
    from launcher.cli.flows.find_vm import shown_now
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.plan_page import WIDTH, wrapped

    disks = disks_of(compute, machine)
    if output is not Output.text:
        printed(machine_data(machine, disks, shown_now(compute)), output)
        return
    print("\n".join(wrapped(f"{machine.name} {how}; {disks_text(disks)}", WIDTH)))
    print(f"launch vm start {machine.name}\n    starts it again")
    print(f"launch vm delete {machine.name}\n    deletes it, with its disk")


def disks_of(compute: Compute, machine: Machine) -> tuple[Disk, ...]:
    """The disks of a VM; none where they can't be read, which is told."""
    from launcher.cli.flows.find_vm import say
    from launcher.compute.lifecycle import list_disks
    from launcher.compute.vm_cost import disks_of
    from launcher.errors import LaunchError

    try:
        return disks_of(machine, list_disks(compute, f'labels.launch-run="{machine.run}"').disks)
    except LaunchError as error:
        say(f"its disk can't be read: {error.problem}")
        return ()


def disks_text(disks: Sequence[Disk]) -> str:
    """`its disk (200 GB pd-balanced) still costs ≈$20.00 a month`"""
    from launcher.compute.vm_cost import disks_usd_per_month
    from launcher.text import usd_text

    if not disks:
        return "its disk is still billed"
    usd = disks_usd_per_month(disks)
    what = " and ".join(f"{disk.size_gb} GB {disk.kind}" for disk in disks)
    return f"its disk ({what}) " + (
        "is still billed" if usd is None else f"still costs {usd_text(usd, approx=True)} a month"
    )

"""`launch vm stop`: stop a VM, so that only its disk is billed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.options import InZone, Output, OutputFormat, VmName, YesForAnother

if TYPE_CHECKING:
    from launcher.jobs.orphans import Disk
    from launcher.jobs.vm import VmInstance
    from launcher.services.compute.client import Compute

STOPPED = frozenset({"STOPPED", "TERMINATED"})
STOPPING = frozenset({"STOPPING", "PENDING_STOP"})


def vm_stop(
    name: VmName,
    *,
    zone: InZone = None,
    yes: YesForAnother = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Stop a VM and wait until it has stopped.

    Its boot disk is kept and billed. Data on its local SSDs (/mnt/localssd) is lost.
    """
    from launcher.cli.flows.confirm import confirm_for_another
    from launcher.cli.flows.find_vm import check_workstation, one_machine, open_compute

    compute = open_compute()
    machine = check_workstation(one_machine(compute, name, zone), "it cannot be stopped separately")
    if machine.status in STOPPED:
        show_stopped(compute, machine, output_format, "is already stopped")
        return
    if not yes:
        again = f"launch vm stop {machine.name} --zone {machine.zone}"
        confirm_for_another(machine.name, machine.labels, "Stop", "stopped", again)
    show_stopped(compute, stop_vm(compute, machine), output_format, "is stopped")


def stop_vm(compute: Compute, machine: VmInstance) -> VmInstance:
    """Stop the VM; return it when it has stopped. Raises LaunchError."""
    from launcher.cli.flows.find_vm import explained_vm_errors
    from launcher.cli.ui.streams import say
    from launcher.services.compute.vm_cost import has_local_ssd
    from launcher.services.compute.workstation import change_and_wait, wait_for_status

    discard = has_local_ssd(machine)
    with explained_vm_errors(machine):
        if machine.status in STOPPING:
            say(f"{machine.name} is already stopping")
            return wait_for_status(compute, machine, STOPPED, say)
        say(f"stopping {machine.name}{'; data on /mnt/localssd will be lost' if discard else ''}")
        return change_and_wait(compute, machine, lambda: compute.stop(machine, discard_local_ssd=discard), STOPPED, say)


def show_stopped(compute: Compute, machine: VmInstance, output: Output, how: str) -> None:
    """Print the VM, what it still costs, and how to start or delete it."""
    from launcher.cli.flows.find_vm import display_time
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.plan_page import WIDTH, wrapped

    disks = known_disks(compute, machine)
    if output is not Output.text:
        printed(machine_data(machine, disks, display_time(compute)), output)
        return
    print("\n".join(wrapped(f"{machine.name} {how}; {disks_text(disks)}", WIDTH)))
    print(f"launch vm start {machine.name}\n    starts it")
    print(f"launch vm delete {machine.name}\n    deletes it and its disk")


def known_disks(compute: Compute, machine: VmInstance) -> tuple[Disk, ...]:
    """Return the disks of a VM; print why if they cannot be read."""
    from launcher.cli.ui.streams import say
    from launcher.errors import LaunchError
    from launcher.services.compute.vm_cost import disks_of

    try:
        return disks_of(machine, compute.disks(f'labels.launch-run="{machine.run}"').disks)
    except LaunchError as error:
        say(f"cannot read its disks: {error.problem}")
        return ()


def disks_text(disks: Sequence[Disk]) -> str:
    """Return `its disk (200 GB pd-balanced) still costs ≈$20.00 a month`."""
    from launcher.services.compute.vm_cost import disks_usd_per_month
    from launcher.text import usd_text

    if not disks:
        return "its disk is still billed"
    usd = disks_usd_per_month(disks)
    what = " and ".join(f"{disk.size_gb} GB {disk.kind}" for disk in disks)
    return f"its disk ({what}) " + (
        "is still billed" if usd is None else f"still costs {usd_text(usd, approx=True)} a month"
    )

"""`launch vm stop`: stop a VM, so that only its disk is billed. `launch vm start`: start it with a new lease."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.cli.flows.confirm import confirm_for_another
from launcher.cli.flows.find_vm import check_workstation, display_time, explained_vm_errors, one_machine, open_compute
from launcher.cli.options import InZone, Output, OutputFormat, VmName, YesForAnother
from launcher.cli.ui.data import machine_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import WIDTH, wrapped
from launcher.cli.ui.vm_text import price_and_end
from launcher.errors import LaunchError
from launcher.jobs.orphans import Disk
from launcher.jobs.vm import LEASE, UP, VmInstance
from launcher.services.compute.client import Compute
from launcher.services.compute.vm_cost import disks_of, disks_usd_per_month, has_local_ssd, price_of
from launcher.services.compute.workstation import begin_change, change_and_wait, wait_for_operation, wait_for_status
from launcher.text import usd_text

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
    discard = has_local_ssd(machine)
    with explained_vm_errors(machine):
        if machine.status in STOPPING:
            say(f"{machine.name} is already stopping")
            return wait_for_status(compute, machine, STOPPED, say)
        say(f"stopping {machine.name}{'; data on /mnt/localssd will be lost' if discard else ''}")
        return change_and_wait(compute, machine, lambda: compute.stop(machine, discard_local_ssd=discard), STOPPED, say)


def show_stopped(compute: Compute, machine: VmInstance, output: Output, how: str) -> None:
    """Print the VM, what it still costs, and how to start or delete it."""
    disks: Sequence[Disk] = ()
    try:
        disks = disks_of(machine, compute.disks(f'labels.launch-run="{machine.run}"').disks)
    except LaunchError as error:
        say(f"cannot read its disks: {error.problem}")
    if output is not Output.text:
        printed(machine_data(machine, disks, display_time(compute)), output)
        return
    print("\n".join(wrapped(f"{machine.name} {how}; {disks_text(disks)}", WIDTH)))
    print(f"launch vm start {machine.name}\n    starts it")
    print(f"launch vm delete {machine.name}\n    deletes it and its disk")


def disks_text(disks: Sequence[Disk]) -> str:
    """Return `its disk (200 GB pd-balanced) still costs ≈$20.00 a month`."""
    if not disks:
        return "its disk is still billed"
    usd = disks_usd_per_month(disks)
    what = " and ".join(f"{disk.size_gb} GB {disk.kind}" for disk in disks)
    return f"its disk ({what}) " + (
        "is still billed" if usd is None else f"still costs {usd_text(usd, approx=True)} a month"
    )


NOTES = {
    "spot": "a Spot VM, which Compute Engine may preempt at any time",
    "flex-start": "a flex-start VM, which waits until capacity is available",
}


def vm_start(
    name: VmName,
    *,
    zone: InZone = None,
    yes: YesForAnother = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Start a stopped VM and wait until it runs.

    Its lease and its time limit start again.
    """
    compute = open_compute()
    machine = one_machine(compute, name, zone)
    hint = f"launch vm SPEC --run --resume {machine.run} resumes the run"
    machine = check_workstation(machine, "it cannot be started separately", hint)
    if machine.status == "RUNNING":
        show_started(compute, machine, output_format, "is already running")
        return
    if not yes:
        again = f"launch vm start {machine.name} --zone {machine.zone}"
        confirm_for_another(machine.name, machine.labels, "Start", "started", again)
    show_started(compute, start_vm(compute, machine), output_format, "is running")


def start_vm(compute: Compute, machine: VmInstance) -> VmInstance:
    """Start the VM; return it when it is running. Raises NoCapacity: its zone has none; LaunchError."""
    running = frozenset({"RUNNING"})
    with explained_vm_errors(machine):
        if machine.status in STOPPING:
            say(f"{machine.name} is stopping; it will be started afterwards")
            machine = wait_for_status(compute, machine, STOPPED, say)
        elif machine.status in UP:
            return wait_for_status(compute, machine, running, say)
        say(f"starting {machine.name}" + (f"; {note}" if (note := NOTES.get(machine.provisioning)) else ""))
        if machine.lease_moved_to is not None:  # launch vm extend moved the last lease
            wait_for_operation(compute, begin_change(lambda: compute.set_metadata(machine, LEASE, None)), say)
        return change_and_wait(compute, machine, lambda: compute.start(machine), running, say)


def show_started(compute: Compute, machine: VmInstance, output: Output, how: str) -> None:
    """Print the VM, its price, its new lease, and how to connect to it."""
    now = display_time(compute)
    if output is not Output.text:
        printed(machine_data(machine, (), now), output)
        return
    print(f"{machine.name} {how}: {price_and_end(machine, price_of(machine), now)}")
    print(f"launch ssh {machine.name}\n    opens a shell once its SSH server is up, in about half a minute")

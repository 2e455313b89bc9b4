"""`launch vm start`: start a stopped VM with a new lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli.commands.vm.stop import STOPPED, STOPPING
from launcher.cli.options import InZone, Output, OutputFormat, VmName, YesForAnother

if TYPE_CHECKING:
    from launcher.jobs.vm import VmInstance
    from launcher.services.compute.client import Compute

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
    from launcher.cli.flows.confirm import confirm_for_another
    from launcher.cli.flows.find_vm import check_workstation, one_machine, open_compute

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
    from launcher.cli.flows.find_vm import explained_vm_errors
    from launcher.cli.ui.streams import say
    from launcher.jobs.vm import LEASE, UP
    from launcher.services.compute.workstation import begin_change, change_and_wait, wait_for_operation, wait_for_status

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
    from launcher.cli.flows.find_vm import display_time
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.vm_text import price_and_end
    from launcher.services.compute.vm_cost import price_of

    now = display_time(compute)
    if output is not Output.text:
        printed(machine_data(machine, (), now), output)
        return
    print(f"{machine.name} {how}: {price_and_end(machine, price_of(machine), now)}")
    print(f"launch ssh {machine.name}\n    opens a shell once its SSH server is up, in about half a minute")

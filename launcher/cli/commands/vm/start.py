"""`launch vm start`: a stopped VM that runs again, with a new lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli.commands.vm.stop import STOPPED, STOPPING
from launcher.cli.options import InZone, Output, OutputFormat, VmName

if TYPE_CHECKING:
    from launcher.compute.client import Compute
    from launcher.jobs.vm import Machine

NOTES = {
    "spot": "it is a Spot VM: Google may stop it again at any moment",
    "flex-start": "it is a flex-start VM: it waits where there are no machines just now",
}


def vm_start(
    name: VmName,
    *,
    zone: InZone = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Start a stopped VM and wait until it runs.

    Its lease, and the time after which Compute Engine stops it, start again.
    """
    from launcher.cli.flows.find_vm import of_work, one_machine, open_compute

    compute = open_compute()
    machine = one_machine(compute, name, zone)
    again = f"launch vm SPEC --run --resume {machine.run} goes on with it"
    machine = of_work(machine, "it isn't started again by hand", again)
    if machine.status == "RUNNING":
        show(compute, machine, output_format, "runs already")
        return
    show(compute, started(compute, machine), output_format, "runs")


def started(compute: Compute, machine: Machine) -> Machine:
    """The VM once it runs. Raises NoCapacity: its zone has no such machine now; LaunchError."""
    from launcher.backend.base import CreateRefused
    from launcher.cli.flows.find_vm import say, waited_for
    from launcher.cli.flows.vm_errors import explained
    from launcher.compute.lifecycle import change_and_wait, wait_for_status
    from launcher.jobs.vm import UP

    running = frozenset({"RUNNING"})
    with waited_for(machine):
        if machine.status in STOPPING:
            say(f"{machine.name} is being stopped; it starts after that")
            machine = wait_for_status(compute, machine, STOPPED, say)
        elif machine.status in UP:
            return wait_for_status(compute, machine, running, say)
        say(f"starting {machine.name}" + (f"; {note}" if (note := NOTES.get(machine.provisioning)) else ""))
        try:
            forget_lease(compute, machine)
            return change_and_wait(compute, machine, lambda: compute.start(machine), running, say)
        except CreateRefused as error:
            raise explained(error, machine) from error


def forget_lease(compute: Compute, machine: Machine) -> None:
    """Take away the end that somebody has moved the last lease to: it may be a minute from now. Raises LaunchError."""
    from launcher.cli.flows.find_vm import say
    from launcher.compute.lifecycle import begin_change, wait_for_operation
    from launcher.jobs.vm import LEASE

    if machine.lease_moved_to is not None:
        wait_for_operation(compute, begin_change(lambda: compute.set_metadata(machine, LEASE, None)), say)


def show(compute: Compute, machine: Machine, output: Output, how: str) -> None:
    """The VM, its price, its new lease, and how to reach it."""
    from launcher.cli.flows.find_vm import shown_now
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.vm_text import price_and_end
    from launcher.compute.vm_cost import price_of

    now = shown_now(compute)
    if output is not Output.text:
        printed(machine_data(machine, (), now), output)
        return
    print(f"{machine.name} {how}: {price_and_end(machine, price_of(machine), now)}")
    print(f"launch ssh {machine.name}\n    once its SSH server is up, in half a minute or so")

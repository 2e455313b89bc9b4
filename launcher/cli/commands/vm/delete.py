"""`launch vm delete`: delete a VM and its disk."""

from __future__ import annotations

import os
from typing import Annotated

from launcher.cli.flows.confirm import confirmed, other_owner
from launcher.cli.flows.find_vm import NoSuchVm, check_workstation, explained_vm_errors, one_machine, open_compute
from launcher.cli.help_page import COMMON, option
from launcher.cli.options import InZone, VmName
from launcher.cli.ui.streams import say
from launcher.cli.ui.vm_text import vm_state
from launcher.errors import LaunchError
from launcher.jobs.vm import VmInstance
from launcher.services.base import GoneError
from launcher.services.compute.client import Compute
from launcher.services.compute.job_state import training_end
from launcher.services.compute.vm_cost import attached_disks
from launcher.services.compute.workstation import begin_change, wait_for_operation
from launcher.ssh import keys
from launcher.ssh.command import alias


def vm_delete(
    name: VmName,
    *,
    zone: InZone = None,
    yes: Annotated[bool, option(COMMON, "--yes", "-y", help="Skip the confirmation.")] = False,
) -> None:
    """Delete a VM with its disk, and wait until it is deleted.

    Asks for confirmation."""
    compute = open_compute()
    try:
        machine = one_machine(compute, name, zone)
    except NoSuchVm as error:
        print(f"nothing to do: {error.problem}")
        return
    check_ended(machine)
    repeat = f"launch vm delete {machine.name} --zone {machine.zone} --yes"
    if not yes and not confirmed(question(machine), "launch vm delete asks for confirmation", repeat):
        raise LaunchError(f"{machine.name} was not deleted")
    print(f"{machine.name} was {delete_vm(compute, machine)}")


def check_ended(machine: VmInstance) -> None:
    """Check that the VM does not run a job. Raises UsageError: it does; LaunchError: its run folder is unreadable."""
    try:
        ended = not machine.trains or training_end(machine) is not None
    except LaunchError as error:
        own = f"gcloud compute instances delete {machine.name} --zone={machine.zone} --project={machine.project}"
        raise LaunchError(
            f"cannot check whether {machine.name} still runs a job: {error.problem}",
            f"launch cancel {machine.run} ends its run. To delete the VM anyway:\n{own}",
        ) from error
    if not ended:
        check_workstation(machine, "it cannot be deleted separately")


def question(machine: VmInstance) -> str:
    """Return the question, which names the disks that will be deleted and kept."""
    state = vm_state(machine)
    lost = [disk for disk in attached_disks(machine) if disk.get("autoDelete")]
    kept = [disk for disk in attached_disks(machine) if not disk.get("autoDelete")]
    asks = [f"Delete {machine.name} ({machine.machine_type} in {machine.zone}, {state})?"]
    if owner := other_owner(machine.labels):
        asks.append(f"It {owner}.")
    asks += [f"All data on its {disk_text(disk)} will be lost." for disk in lost]
    asks += [f"Its {disk_text(disk)} is kept and billed." for disk in kept]
    return "\n".join(asks)


def disk_text(disk: dict[str, object]) -> str:
    """Return `boot disk (200 GB)`."""
    size = f" ({disk['diskSizeGb']} GB)" if disk.get("diskSizeGb") else ""
    return f"{'boot disk' if disk.get('boot') else 'disk'}{size}"


def delete_vm(compute: Compute, machine: VmInstance) -> str:
    """Delete the VM; return `deleted` or `already deleted`. Raises LaunchError."""
    with explained_vm_errors(machine):
        say(f"deleting {machine.name}")
        try:
            wait_for_operation(compute, begin_change(lambda: compute.delete(machine)), say)
            how = "deleted"
        except GoneError:
            how = "already deleted"
    keys.forget(keys.settings_folder(os.environ), alias(machine))
    return how

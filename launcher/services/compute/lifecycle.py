"""Start, stop or delete a VM and wait for it; Google's clock; launch's disks; how a VM's training ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from launcher.errors import LaunchError, StillRunning
from launcher.gcp.api import UnreachableError, answer_behind, refusal_of
from launcher.jobs.orphans import Disk, of_disk
from launcher.jobs.vm import VmInstance, last_url_part
from launcher.services.base import CreateRefused, GoneError
from launcher.services.compute import end_record
from launcher.services.compute.client import SERVICE, Compute
from launcher.services.compute.end_record import Record
from launcher.services.compute.node_set import nodes_of
from launcher.services.compute.operations import Operation

Say = Callable[[str], None]
MAX_SECONDS: Final = 900.0
"""Time limit for a VM to start or stop. A machine with many GPUs takes minutes."""
REPORT_SECONDS: Final = 20.0
"""Interval of progress lines."""
POLL_SECONDS: Final = 2.0
FOLDER_SECONDS: Final = 20.0
"""Timeout of one call to a run folder."""


class DiskList(NamedTuple):
    """Launch's disks, and the zones that could not be read, each with Google's message."""

    disks: tuple[Disk, ...]
    unread: dict[str, str]


# --- Change a VM -----------------------------------------------------------------------------------------------------


def change_and_wait(
    compute: Compute, machine: VmInstance, change: Callable[[], Operation], statuses: frozenset[str], say: Say
) -> VmInstance:
    """Change a VM, wait until it has one of the `statuses`, and return it. `say` reports progress.

    Raises:
        CreateRefused: Google refused the change, at once or later.
        GoneError: the VM no longer exists.
        StillRunning: not done after a quarter of an hour.
    """
    wait_for_operation(compute, begin_change(change), say)
    return wait_for_status(compute, machine, statuses, say)


def begin_change(change: Callable[[], Operation]) -> Operation:
    """Begin a change and return its operation.

    Raises CreateRefused; GoneError; UnreachableError: it is unknown whether it began.
    """
    from google.api_core.exceptions import GoogleAPICallError

    try:
        return change()
    except (GoneError, UnreachableError):
        raise
    except LaunchError as error:
        answer = answer_behind(error)
        if not isinstance(answer, GoogleAPICallError) or answer.code == 401:
            raise
        raise CreateRefused(error.problem, refusal_of(answer, SERVICE)) from error


def wait_for_operation(compute: Compute, operation: Operation, say: Say) -> Operation:
    """Wait until an operation has succeeded, and return it. Outages are tolerated.

    Raises CreateRefused, StillRunning.
    """
    began = compute.clock.now()
    while not operation.done:
        waited = compute.clock.now() - began
        if waited >= MAX_SECONDS:
            raise StillRunning(f"Compute Engine has not finished after {waited / 60:.0f} minutes; it continues")
        try:
            operation = compute.wait(operation, REPORT_SECONDS)
        except StillRunning:
            say(f"still waiting for Compute Engine ({compute.clock.now() - began:.0f} s)")
        except UnreachableError as error:
            say(f"temporarily unavailable, retrying: {error.problem}")
    if operation.failed:
        raise CreateRefused(f"Compute Engine: {operation.refusal.message}", operation.refusal)
    return operation


def wait_for_status(compute: Compute, machine: VmInstance, statuses: frozenset[str], say: Say) -> VmInstance:
    """Wait until a VM has one of the `statuses`, and return it. Raises GoneError, StillRunning."""
    began = reported = compute.clock.now()
    while True:
        try:
            machine = compute.instance(machine.zone, machine.id)
        except UnreachableError as error:
            say(f"temporarily unavailable, retrying: {error.problem}")
        else:
            if machine.status in statuses:
                return machine
        now = compute.clock.now()
        if now - began >= MAX_SECONDS:
            raise StillRunning(f"{machine.name} is still {machine.status} after {(now - began) / 60:.0f} minutes")
        if now - reported >= REPORT_SECONDS:
            say(f"{machine.name} is {machine.status}")
            reported = now
        compute.clock.sleep(POLL_SECONDS)


# --- Read ------------------------------------------------------------------------------------------------------------


def google_now(compute: Compute) -> float:
    """Return Unix seconds by Google's clock, which leases are based on. This machine's clock may be wrong.

    Raises UnreachableError.
    """
    return float(compute.rest_api().ask("now"))


def list_disks(compute: Compute, filter_: str) -> DiskList:
    """Return the disks in all zones that match a filter (labels.launch-run:*)."""
    api, token = compute.rest_api(), ""
    disks: list[Disk] = []
    unread: dict[str, str] = {}
    while True:
        page = api.ask("disks", filter=filter_, page_token=token)
        for scope, listed in page.get("items", {}).items():
            disks += map(of_disk, listed.get("disks", ()))
            warning = listed.get("warning", {})
            if warning and warning.get("code") != "NO_RESULTS_ON_PAGE":
                unread[last_url_part(scope)] = warning.get("message", "") or warning.get("code", "")
        unread.update({last_url_part(scope): "unreachable" for scope in page.get("unreachables", ())})
        if not (token := page.get("nextPageToken", "")):
            return DiskList(tuple(disks), unread)


def training_end(machine: VmInstance) -> Record | None:
    """Return the record of how a VM's training ended, from its run folder. None: it has not ended.

    With several VMs it is the one that ended first. Raises LaunchError: the folder can't be read.
    """
    from launcher.gcp.storage import open_folder

    folder = str(machine.parameters.get("run_folder", ""))
    if not folder:
        return None
    records = end_record.read_all(open_folder(folder).within(FOLDER_SECONDS))
    if own := records.get(machine.id):
        return own
    if len(names := nodes_of(machine)) == 1:
        return None
    together = [record for record in records.values() if record.zone == machine.zone and record.name in names]
    # VMs of an earlier attempt have the same names.
    later = [record for record in together if (record.ended or 0.0) > machine.created]
    return min(later, key=lambda record: record.ended or 0.0, default=None)

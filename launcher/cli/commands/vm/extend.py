"""`launch vm extend`: another end for a VM's lease, up to the limit that Google keeps."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated

from launcher.cli.help_page import COST, option
from launcher.cli.options import InZone, Output, OutputFormat, VmName
from launcher.errors import UsageError

if TYPE_CHECKING:
    from datetime import datetime

    from launcher.compute.client import Compute
    from launcher.jobs.vm import Machine


def vm_extend(
    name: VmName,
    *,
    lease: Annotated[
        str | None,
        option(COST, "--lease", help="New lease, from now on: 90m, 4h.", metavar="TIME"),
    ] = None,
    until: Annotated[
        str | None,
        option(COST, "--until", help="End of the lease in local time: 22:40, 2026-11-22T06:40.", metavar="WHEN"),
    ] = None,
    zone: InZone = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Move the end of a VM's lease to a later or earlier time.

    The lease cannot end after the time at which Compute Engine ends the VM (--hours at its creation). That time counts
    from the VM's last start and cannot change while it runs.
    """
    from launcher.cli.flows.find_vm import of_work, one_machine, open_compute
    from launcher.compute.lifecycle import google_now

    if (lease is None) == (until is None):
        raise UsageError("until when? Say one of --lease and --until", f"launch vm extend {name} --lease 4h")
    compute = open_compute()
    machine = leasing(of_work(one_machine(compute, name, zone), "its time is its run's"))
    now = google_now(compute)
    wanted = wished(lease, until, now)
    ends = wanted if machine.ceiling is None else min(wanted, machine.ceiling)
    show(moved(compute, machine, math.ceil(ends)), ends < wanted, now, output_format)


def leasing(machine: Machine) -> Machine:
    """The VM, if its lease runs. Raises UsageError."""
    from launcher.jobs.vm import DOWN

    if machine.status in DOWN or machine.started is None:
        raise UsageError(
            f"{machine.name} doesn't run: its lease begins when it starts", f"launch vm start {machine.name}"
        )
    return machine


def wished(lease: str | None, until: str | None, now: float) -> float:
    """The end that is asked for, in Unix seconds; `now` is Google's. Raises UsageError."""
    from launcher.cli.flows.find_vm import say
    from launcher.cli.ui.text import flag_seconds

    if lease is not None:
        return now + flag_seconds(lease, "--lease")
    ends, note = moment(until or "", now)
    if ends <= now:
        raise UsageError(f"--until {until} is over", "launch vm stop NAME stops it now")
    if note:
        say(note)
    return ends


def moment(text: str, now: float) -> tuple[float, str]:
    """Return a time of day, the next one, or a date and time, in Unix seconds; and a note where the clocks change.

    Times without an offset are this machine's. One that the clocks skip is taken with the offset from before the change
    (02:30 becomes 03:30); one that happens twice is taken the first time that is still to come. Raises UsageError.
    """
    from datetime import datetime, timedelta

    try:
        if len(text) > len("22:40"):
            told = datetime.fromisoformat(text)
            return (told.timestamp(), "") if told.tzinfo else first(told, now)
        told = datetime.strptime(text, "%H:%M")  # noqa: DTZ007 - this machine's zone
    except ValueError:
        raise UsageError(f"--until {text!r} isn't a time", "Write 22:40, or 2026-11-22T06:40.") from None
    today = local(now).replace(hour=told.hour, minute=told.minute, second=0, microsecond=0, fold=0)
    found = first(today, now)
    return found if found[0] > now else first(today + timedelta(days=1), now)


def first(wanted: datetime, now: float) -> tuple[float, str]:
    """Return the first moment after `now` (if there is one) at which this machine's clock shows a time, and a note."""
    at, again = wanted.timestamp(), wanted.replace(fold=1).timestamp()
    found = again if at <= now < again else at
    shown = local(found)
    name = time.strftime("%Z", time.localtime(found))
    if again > at:
        return found, f"{wanted:%H:%M} happens twice on {wanted:%Y-%m-%d}: taken as {shown:%H:%M} {name}"
    if shown.replace(fold=0) != wanted:
        return found, f"{wanted:%H:%M} does not exist on {wanted:%Y-%m-%d}: taken as {shown:%H:%M} {name}"
    return found, ""


def local(at: float) -> datetime:
    """Return this machine's wall clock, without an offset: `timestamp()` looks that up for each date by itself."""
    from datetime import datetime

    return datetime.fromtimestamp(at)  # noqa: DTZ006 - as said above


def moved(compute: Compute, machine: Machine, ends: int) -> Machine:
    """The VM once its watchdog can see the new end. Raises LaunchError."""
    from launcher.backend.base import CreateRefused
    from launcher.cli.flows.find_vm import say, waited_for
    from launcher.cli.flows.vm_errors import explained
    from launcher.compute.lifecycle import begin_change, wait_for_operation
    from launcher.jobs.vm import LEASE

    with waited_for(machine):
        try:
            wait_for_operation(compute, begin_change(lambda: compute.set_metadata(machine, LEASE, str(ends))), say)
        except CreateRefused as error:
            raise explained(error, machine) from error
    return compute.instance(machine.zone, machine.id)


def show(machine: Machine, short: bool, now: float, output: Output) -> None:
    """The VM with its new end. `short`: the limit didn't allow all that was asked for."""
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.text import clock_text
    from launcher.cli.ui.vm_text import price_and_end
    from launcher.compute.vm_cost import price_of

    if output is not Output.text:
        printed(machine_data(machine, (), now), output)
        return
    print(f"{machine.name}: {price_and_end(machine, price_of(machine), now)}")
    if short and machine.ceiling is not None:
        print(f"No longer than that: Google itself ends it {clock_text(machine.ceiling, now)}, and that can't be moved")
        print(f"while it runs. launch vm stop {machine.name}, then launch vm start {machine.name}, begins anew.")

"""`launch vm extend`: move the end of a VM's lease, up to the limit that Compute Engine enforces."""

from __future__ import annotations

import math
import shlex
import time
from datetime import datetime, timedelta
from typing import Annotated

from launcher.cli.flows.confirm import confirm_for_another
from launcher.cli.flows.find_vm import check_workstation, explained_vm_errors, one_machine, open_compute
from launcher.cli.help_page import COST, option
from launcher.cli.options import InZone, Output, OutputFormat, VmName, YesForAnother, flag_seconds
from launcher.cli.ui.data import machine_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import local_moment
from launcher.cli.ui.vm_text import price_and_end
from launcher.errors import UsageError
from launcher.jobs.vm import DOWN, LEASE, VmInstance
from launcher.services.compute.vm_cost import price_of
from launcher.services.compute.workstation import begin_change, wait_for_operation


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
    yes: YesForAnother = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Move the end of a VM's lease to a later or earlier time.

    The lease cannot end after the time at which Compute Engine ends the VM (--hours at its creation). That time counts
    from the VM's last start and cannot change while it runs.
    """
    if (lease is None) == (until is None):
        raise UsageError("exactly one of --lease and --until is required", f"launch vm extend {name} --lease 4h")
    compute = open_compute()
    machine = check_workstation(one_machine(compute, name, zone), "it has no lease")
    if machine.status in DOWN or machine.started is None:
        raise UsageError(
            f"{machine.name} is not running; its lease begins when it starts", f"launch vm start {machine.name}"
        )
    now = compute.google_now()
    wanted = requested_end(lease, until, now)
    ends = wanted if machine.ceiling is None else min(wanted, machine.ceiling)
    if not yes:
        again = ["launch", "vm", "extend", machine.name, *(["--lease", lease] if lease else ["--until", until or ""])]
        command = shlex.join([*again, "--zone", machine.zone])
        confirm_for_another(machine.name, machine.labels, "Extend", "extended", command)
    with explained_vm_errors(machine):
        change = begin_change(lambda: compute.set_metadata(machine, LEASE, str(math.ceil(ends))))
        wait_for_operation(compute, change, say)
    show_lease(compute.instance(machine.zone, machine.id), ends < wanted, now, output_format)


def requested_end(lease: str | None, until: str | None, now: float) -> float:
    """Return the requested end in Unix seconds; `now` is Google's time. Raises UsageError."""
    if lease is not None:
        return now + flag_seconds(lease, "--lease")
    ends, note = moment(until or "", now)
    if ends <= now:
        raise UsageError(f"--until {until} is in the past", "launch vm stop NAME stops it now")
    if note:
        say(note)
    return ends


def moment(text: str, now: float) -> tuple[float, str]:
    """Parse the next time of day, or a date and time; return Unix seconds, and a note if the clocks change then.

    Times without an offset are local. A time that the clocks skip gets the offset from before the change (02:30 becomes
    03:30); a time that occurs twice is the first one in the future. Raises UsageError.
    """
    try:
        if len(text) > len("22:40"):
            parsed = datetime.fromisoformat(text)
            return (parsed.timestamp(), "") if parsed.tzinfo else first_moment(parsed, now)
        parsed = datetime.strptime(text, "%H:%M")  # noqa: DTZ007 - local time
    except ValueError:
        raise UsageError(f"--until: invalid time {text!r}; use for example 22:40 or 2026-11-22T06:40") from None
    today = local_time(now).replace(hour=parsed.hour, minute=parsed.minute, second=0, microsecond=0, fold=0)
    end = first_moment(today, now)
    return end if end[0] > now else first_moment(today + timedelta(days=1), now)


def first_moment(wanted: datetime, now: float) -> tuple[float, str]:
    """Return the first moment after `now`, if any, at which the local clock shows a time, and a note."""
    at, again = wanted.timestamp(), wanted.replace(fold=1).timestamp()
    end = again if at <= now < again else at
    shown = local_time(end)
    name = time.strftime("%Z", time.localtime(end))
    if again > at:
        return end, f"{wanted:%H:%M} happens twice on {wanted:%Y-%m-%d}: taken as {shown:%H:%M} {name}"
    if shown.replace(fold=0) != wanted:
        return end, f"{wanted:%H:%M} does not exist on {wanted:%Y-%m-%d}: taken as {shown:%H:%M} {name}"
    return end, ""


def local_time(at: float) -> datetime:
    """Return local time without an offset: `timestamp()` finds the offset of each date."""
    return datetime.fromtimestamp(at)  # noqa: DTZ006 - see the docstring


def show_lease(machine: VmInstance, short: bool, now: float, output: Output) -> None:
    """Print the VM with its new end. `short`: the limit cut the requested lease."""
    if output is not Output.text:
        printed(machine_data(machine, (), now), output)
        return
    print(f"{machine.name}: {price_and_end(machine, price_of(machine), now)}")
    if short and machine.ceiling is not None:
        print(f"That is its limit: Compute Engine ends it {local_moment(machine.ceiling, now)}, which cannot change")
        print(f"while it runs. launch vm stop {machine.name}, then launch vm start {machine.name}, resets the limit.")

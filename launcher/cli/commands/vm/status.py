"""`launch vm status`: one VM as Compute Engine has it, what it costs, when it stops, and how to reach it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from launcher.cli.options import InZone, Output, OutputFormat, VmName

if TYPE_CHECKING:
    from launcher.catalog import Price
    from launcher.compute.client import Compute
    from launcher.compute.operations import Operation
    from launcher.jobs.orphans import Disk
    from launcher.jobs.vm import Machine

TOLD = 3
"""Operations that went wrong, or were Google's own, that are shown: the newest."""


class Seen(NamedTuple):
    """All that is known of a VM at one moment."""

    machine: Machine
    price: Price
    disks: tuple[Disk, ...]
    says: Mapping[str, str]
    """Its guest attributes: how far its startup script is."""
    operations: Sequence[Operation]
    now: float


def vm_status(
    name: VmName,
    *,
    zone: InZone = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Show a VM's state, price, lease and addresses.

    Also shows how to connect to it and what failed on it.
    """
    from launcher.cli.flows.find_vm import one_machine, open_compute
    from launcher.cli.ui.data import machine_data
    from launcher.cli.ui.documents import printed

    compute = open_compute()
    seen = look(compute, one_machine(compute, name, zone))
    if output_format is Output.text:
        print("\n".join(lines(seen)))
        return
    data = machine_data(seen.machine, seen.disks, seen.now)
    told = [{"kind": one.kind, "time": one.inserted, "error": error_text(one)} for one in seen.operations]
    printed({**data, "says": dict(seen.says), "operations": told}, output_format)


def look(compute: Compute, machine: Machine) -> Seen:
    """What else is to be known of a VM; what can't be read is told, and left out."""
    import time

    from launcher.cli.flows.find_vm import say
    from launcher.compute.lifecycle import DiskList, google_now, list_disks
    from launcher.compute.vm_cost import disks_of, price_of
    from launcher.errors import LaunchError
    from launcher.gcp.parallel import together

    found = together(
        {
            "now": lambda: google_now(compute),
            "disks": lambda: list_disks(compute, f'labels.launch-run="{machine.run}"'),
            "says": lambda: compute.guest_attributes(machine) if machine.status == "RUNNING" else {},
            "operations": lambda: compute.operations_of(machine.zone, machine.id),
        }
    )
    for what in ("disks", "says", "operations"):
        if isinstance(error := found[what], LaunchError):
            say(f"its {'guest attributes' if what == 'says' else what} can't be read: {error.problem}")
    now, disks, says, operations = (
        None if isinstance(found[what], LaunchError) else found[what] for what in ("now", "disks", "says", "operations")
    )
    return Seen(
        machine=machine,
        price=price_of(machine),
        disks=disks_of(machine, disks.disks if isinstance(disks, DiskList) else ()),
        says=says if isinstance(says, dict) else {},
        operations=tuple(filter(is_telling, operations if isinstance(operations, tuple) else ()))[:TOLD],
        now=now if isinstance(now, float) else time.time(),
    )


def is_telling(operation: Operation) -> bool:
    """One that failed, or that Google has begun: compute.instances.preempted, .hostError, .automaticRestart."""
    return operation.failed or operation.kind.startswith("compute.instances.")


# --- The page --------------------------------------------------------------------------------------------------------


def lines(seen: Seen) -> Iterator[str]:
    """The page, in at most 80 columns."""
    from launcher.cli.ui.plan_page import LABEL, WIDTH, labelled, wrapped

    yield from wrapped(f"{seen.machine.name}  {headline(seen)}", WIDTH)
    yield ""
    for label, text in (*money(seen), *place(seen)):
        yield from labelled(label, text)
    for label, text in names(seen):
        yield f"{label:{LABEL}}{text}"  # in one piece, to be copied
    for number, operation in enumerate(seen.operations):
        yield from labelled("" if number else "events", event(operation))


def headline(seen: Seen) -> str:
    """`runs for 3 h 12 min`, `is stopped`, `is STAGING`."""
    from launcher.cli.ui.text import elapsed
    from launcher.jobs.vm import DOWN

    machine = seen.machine
    if machine.status == "RUNNING" and machine.started is not None:
        return f"runs for {elapsed(max(0.0, seen.now - machine.started))}"
    return "is stopped" if machine.status in DOWN else f"is {machine.status}"


def money(seen: Seen) -> Iterator[tuple[str, str]]:
    """What it costs, and when it ends."""
    from launcher.cli.ui.text import clock_text
    from launcher.cli.ui.vm_text import price_and_end
    from launcher.compute.vm_cost import disks_usd_per_month, usd_so_far
    from launcher.jobs.vm import DOWN
    from launcher.text import rough_duration, usd_text

    machine, now = seen.machine, seen.now
    yield "price", price_and_end(machine, seen.price, now)
    so_far = usd_so_far(machine, seen.price, now)
    if so_far and machine.started is not None:
        yield "cost", f"{usd_text(so_far, seen.price.approx)} since its last start ({clock_text(machine.started, now)})"
    for disk in seen.disks:
        usd = disks_usd_per_month([disk])
        costs = "price unknown" if usd is None else f"{usd_text(usd, approx=True)} a month"
        down = machine.status in DOWN
        yield "disk", f"{disk.size_gb} GB {disk.kind}, {costs}{', while it is stopped too' if not down else ''}"
    until = machine.lease_until
    if until is not None and until != machine.ceiling:
        left = f"{rough_duration(until - now)} left" if until > now else "over"
        yield "lease", f"until {clock_text(until, now)}, {left}; launch vm extend {machine.name} --lease 4h moves it"
    if machine.ceiling is not None:
        yield "limit", f"{clock_text(machine.ceiling, now)}: then Google itself ends it, and that can't be moved"


def place(seen: Seen) -> Iterator[tuple[str, str]]:
    """Where and what it is."""
    from launcher.cli.ui.vm_text import state_text

    machine = seen.machine
    state = seen.says.get("state", "")
    reason = f" ({seen.says['reason']})" if seen.says.get("reason") else ""
    said = {"ready": "; ready to work on", "failed": "; its setup failed"}.get(state, f"; its setup is at: {state}")
    yield "state", f"{state_text(machine)}{said if state else ''}{reason}"
    yield "machine", f"{machine.machine_type}{gpus_text(machine)}, {machine.provisioning} in {machine.zone}"
    outside = f", {machine.external_ip} from outside" if machine.external_ip else "; none from outside (IAP)"
    yield "address", f"{machine.internal_ip or 'none yet'}{outside}"


def gpus_text(machine: Machine) -> str:
    """` (2 × NVIDIA L4)`, where the catalog knows."""
    from launcher import catalog
    from launcher.compute.vm_cost import shape_of

    shape = shape_of(machine)
    return f" ({shape.gpus} × {catalog.load().gpus[shape.gpu].title})" if shape else ""


def names(seen: Seen) -> Iterator[tuple[str, str]]:
    """What one may want to copy."""
    machine = seen.machine
    if image := next((disk.image for disk in seen.disks if disk.image), ""):
        yield "image", image
    accounts = machine.request.get("serviceAccounts") or [{"email": "none"}]
    yield "account", str(accounts[0].get("email", ""))
    yield "vm", machine.resource
    if machine.trains:
        yield "run", f"launch status {machine.run}"
    elif machine.status == "RUNNING":
        yield "reach", f"launch ssh {machine.name}"
    else:
        yield "start", f"launch vm start {machine.name}"


def event(operation: Operation) -> str:
    """`2026-11-20 10:00:00 UTC start failed: ZONE_RESOURCE_POOL_EXHAUSTED: …`"""
    from launcher.cli.ui.text import stamp

    text = error_text(operation)
    how = f" failed: {text}" if text else ""
    return f"{stamp(operation.inserted)} {operation.kind.removeprefix('compute.instances.')}{how}"


def error_text(operation: Operation) -> str | None:
    """Why it failed; None: it didn't."""
    if not operation.failed:
        return None
    refusal = operation.refusal
    return f"{refusal.reason}: {refusal.message}" if refusal.reason else refusal.message

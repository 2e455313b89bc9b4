"""`launch vm status`: show a VM's state, cost, end, addresses and failures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launch_train.common.text import elapsed
from launcher import catalog
from launcher.catalog import Price
from launcher.cli.flows.find_vm import one_machine, open_compute
from launcher.cli.options import InZone, Output, OutputFormat, VmName
from launcher.cli.ui.data import machine_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import LABEL, WIDTH, labelled, local_moment, utc_stamp, wrapped
from launcher.cli.ui.vm_text import price_and_end, vm_state
from launcher.errors import LaunchError
from launcher.gcp.parallel import together
from launcher.jobs.orphans import Disk
from launcher.jobs.vm import DOWN, VmInstance
from launcher.services.compute.client import Compute, DiskList, Operation
from launcher.services.compute.vm_cost import catalog_machine, disks_of, disks_usd_per_month, price_of, usd_so_far
from launcher.text import rough_duration, usd_text

SHOWN = 3
"""Most operations to show: the newest that failed or that Google started."""


class VmSnapshot(NamedTuple):
    """A snapshot of a VM."""

    machine: VmInstance
    price: Price
    disks: tuple[Disk, ...]
    says: Mapping[str, str]
    """Its guest attributes: the progress of its startup script."""
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
    compute = open_compute()
    snapshot = read_snapshot(compute, one_machine(compute, name, zone))
    data = machine_data(snapshot.machine, snapshot.disks, snapshot.now)
    operations = [
        {"kind": operation.kind, "time": operation.inserted, "error": operation_error(operation)}
        for operation in snapshot.operations
    ]
    printed({**data, "says": dict(snapshot.says), "operations": operations}, output_format, page=vm_lines(snapshot))


def read_snapshot(compute: Compute, machine: VmInstance) -> VmSnapshot:
    """Read the disks, guest attributes and operations of a VM; print and omit what cannot be read."""

    answers = together(
        {
            "now": compute.google_now,
            "disks": lambda: compute.disks(f'labels.launch-run="{machine.run}"'),
            "says": lambda: compute.guest_attributes(machine) if machine.status == "RUNNING" else {},
            "operations": lambda: compute.operations_of(machine.zone, machine.id),
        }
    )
    for what in ("disks", "says", "operations"):
        if isinstance(error := answers[what], LaunchError):
            say(f"cannot read its {'guest attributes' if what == 'says' else what}: {error.problem}")
    now, disks, says, operations = (
        None if isinstance(answers[what], LaunchError) else answers[what]
        for what in ("now", "disks", "says", "operations")
    )
    # Those that failed or that Google started: compute.instances.preempted, .hostError …
    known = operations if isinstance(operations, tuple) else ()
    relevant = [each for each in known if each.refusal or each.kind.startswith("compute.instances.")]
    return VmSnapshot(
        machine=machine,
        price=price_of(machine),
        disks=disks_of(machine, disks.disks if isinstance(disks, DiskList) else ()),
        says=says if isinstance(says, dict) else {},
        operations=tuple(relevant[:SHOWN]),
        now=now if isinstance(now, float) else time.time(),
    )


# --- The page --------------------------------------------------------------------------------------------------------


def vm_lines(snapshot: VmSnapshot) -> Iterator[str]:
    """Yield the page, in at most 80 columns."""
    machine = snapshot.machine
    state = "stopped" if machine.status in DOWN else machine.status
    if machine.status == "RUNNING" and machine.started is not None:
        state = f"running for {elapsed(max(0.0, snapshot.now - machine.started))}"
    yield from wrapped(f"{machine.name}  {state}", WIDTH)
    yield ""
    for label, text in (*money(snapshot), *place_facts(snapshot)):
        yield from labelled(label, text)
    for label, text in name_facts(snapshot):
        yield f"{label:{LABEL}}{text}"  # not wrapped, to be copied
    for number, operation in enumerate(snapshot.operations):
        how = f" failed: {error}" if (error := operation_error(operation)) else ""
        kind = operation.kind.removeprefix("compute.instances.")
        yield from labelled("" if number else "events", f"{utc_stamp(operation.inserted)} {kind}{how}")


def money(snapshot: VmSnapshot) -> Iterator[tuple[str, str]]:
    """Yield its price and cost, its disks and its end."""
    machine, now = snapshot.machine, snapshot.now
    yield "price", price_and_end(machine, snapshot.price, now)
    so_far = usd_so_far(machine, snapshot.price, now)
    if so_far and machine.started is not None:
        yield (
            "cost",
            f"{usd_text(so_far, snapshot.price.approx)} since its last start ({local_moment(machine.started, now)})",
        )
    for disk in snapshot.disks:
        usd = disks_usd_per_month([disk])
        costs = "price unknown" if usd is None else f"{usd_text(usd, approx=True)} a month"
        down = machine.status in DOWN
        yield "disk", f"{disk.size_gb} GB {disk.kind}, {costs}{', also while stopped' if not down else ''}"
    until = machine.lease_until
    if until is not None and until != machine.ceiling:
        left = f"{rough_duration(until - now)} left" if until > now else "expired"
        yield (
            "lease",
            f"until {local_moment(until, now)}, {left}; launch vm extend {machine.name} --lease 4h changes it",
        )
    if machine.ceiling is not None:
        yield "limit", f"{local_moment(machine.ceiling, now)}: Compute Engine ends it then; fixed while it runs"


def place_facts(snapshot: VmSnapshot) -> Iterator[tuple[str, str]]:
    """Yield its state, machine type, zone and addresses."""
    machine = snapshot.machine
    shape = catalog_machine(machine)
    gpus = f" ({shape.gpus} × {catalog.load().gpus[shape.gpu].title})" if shape else ""
    state = snapshot.says.get("state", "")
    reason = f" ({snapshot.says['reason']})" if snapshot.says.get("reason") else ""
    setup = {"ready": "; ready to use", "failed": "; setup failed"}.get(state, f"; setup step: {state}")
    yield "state", f"{vm_state(machine)}{setup if state else ''}{reason}"
    yield "machine", f"{machine.machine_type}{gpus}, {machine.provisioning} in {machine.zone}"
    external = f", external {machine.external_ip}" if machine.external_ip else "; no external address (IAP)"
    yield "address", f"{machine.internal_ip or 'none yet'}{external}"


def name_facts(snapshot: VmSnapshot) -> Iterator[tuple[str, str]]:
    """Yield names and commands to copy."""
    machine = snapshot.machine
    if image := next((disk.image for disk in snapshot.disks if disk.image), ""):
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


def operation_error(operation: Operation) -> str | None:
    """Return why an operation failed, or None if it did not."""
    if (refusal := operation.refusal) is None:
        return None
    return f"{refusal.reason}: {refusal.message}" if refusal.reason else refusal.message

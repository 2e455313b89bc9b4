"""Compute the cost of VMs and their disks from the catalog: per hour, per month, and so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec.structs import replace

from launcher import catalog
from launcher.catalog import MachineType, Price
from launcher.jobs.orphans import Disk
from launcher.jobs.vm import VmInstance, last_url_part
from launcher.plan.cost import MONTH_HOURS, with_local_ssds

BILLED: Final = frozenset({"RUNNING", "STOPPING", "PENDING_STOP", "SUSPENDING", "REPAIRING"})
"""Statuses in which a VM is billed: from RUNNING until it has stopped (cloud.google.com/compute/docs/instances/
instance-life-cycle)."""


def price_of(machine: VmInstance, user_price: float | None = None) -> Price:
    """Return the price of the running VM per hour, local SSDs included.

    `user_price` (--price) applies if the catalog has none.
    """
    known = catalog.load()
    shape = catalog_machine(machine)
    if shape is None:
        price = catalog.Price(usd=None, approx=True, rule="unknown machine", excludes=())
    else:
        price = known.price(shape, "compute", machine.provisioning, machine.zone)
        if not shape.local_ssd_auto:
            rate = known.component("local-ssd-gib", machine.zone)
            price = with_local_ssds(price, count_local_ssds(machine), rate, spot=machine.provisioning == "spot")
    if price.usd is None and user_price is not None:
        return replace(price, usd=user_price, approx=False, rule="set by --price")
    return price


def catalog_machine(machine: VmInstance) -> MachineType | None:
    """Return the VM's machine in the catalog (for N1, the shape with its attached GPUs), or None."""
    known = catalog.load()
    shapes = known.machines.get(machine.machine_type, ())
    attached = [
        (last_url_part(str(accelerator.get("acceleratorType", ""))), int(accelerator.get("acceleratorCount", 0)))
        for accelerator in machine.request.get("guestAccelerators", ())
    ]
    if len(shapes) > 1:
        return next((shape for shape in shapes if (known.gpus[shape.gpu].accelerator, shape.gpus) in attached), None)
    return next(iter(shapes), None)


def attached_disks(machine: VmInstance) -> list[dict[str, Any]]:
    """Return the Instance's disks that are kept when it stops."""
    return [disk for disk in machine.request.get("disks", ()) if disk.get("type") != "SCRATCH"]


def count_local_ssds(machine: VmInstance) -> int:
    """Return the number of local SSDs that the Instance lists."""
    return sum(disk.get("type") == "SCRATCH" for disk in machine.request.get("disks", ()))


def has_local_ssd(machine: VmInstance) -> bool:
    """Return whether a stop loses data on /mnt/localssd: some machine types include local SSDs."""
    shape = catalog_machine(machine)
    return bool(count_local_ssds(machine)) or (shape is not None and shape.local_ssd_auto)


def usd_so_far(machine: VmInstance, price: Price, now: float) -> float | None:
    """Return the cost since the last start, without disks; None: the price is unknown."""
    if machine.status not in BILLED or machine.started is None:
        return 0.0
    return None if price.usd is None else price.usd * max(0.0, now - machine.started) / 3600


def disks_of(machine: VmInstance, disks: Iterable[Disk]) -> tuple[Disk, ...]:
    """Return those of `disks` that are attached to the VM."""
    return tuple(disk for disk in disks if disk.zone == machine.zone and machine.name in disk.users)


def disks_usd_per_month(disks: Iterable[Disk]) -> float | None:
    """Return the price of disks per month; None: one of the prices is unknown."""
    known = catalog.load()
    rates = [(disk, known.disk_price(disk.kind, disk.region)) for disk in disks]
    if any(rate is None for _, rate in rates):
        return None
    return sum(disk.size_gb * rate for disk, rate in rates if rate)


def vm_usd_per_month(machine: VmInstance, disks: Iterable[Disk]) -> float | None:
    """Return the price of the VM per month in its current status. None: the machine's price is unknown.

    Disks count if their price is known.
    """
    disks = list(disks)
    disk_usd = disks_usd_per_month(disks) if disks else None
    if machine.status not in BILLED:
        return disk_usd
    price = price_of(machine).usd
    return None if price is None else MONTH_HOURS * price + (disk_usd or 0.0)

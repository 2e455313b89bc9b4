"""What VMs and their disks cost, by the catalog alone: the price of what runs, of what only lies there, and so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from launcher.jobs.vm import last

if TYPE_CHECKING:
    from launcher.catalog import MachineType, Price
    from launcher.jobs.orphans import Disk
    from launcher.jobs.vm import Machine

BILLED: Final = frozenset({"RUNNING", "STOPPING", "PENDING_STOP", "SUSPENDING", "REPAIRING"})
"""States in which a VM is charged for: from RUNNING until it has stopped (cloud.google.com/compute/docs/instances/
instance-life-cycle)."""


def price_of(machine: Machine, said: float | None = None) -> Price:
    """What an hour of the VM costs while it runs, its local SSDs included; `said` (--price) where the catalog doesn't
    know."""
    from launcher import catalog
    from launcher.plan.cost import with_local_ssds

    known = catalog.load()
    shape = shape_of(machine)
    if shape is None:
        price = catalog.Price(usd=None, approx=True, rule="unknown machine", source="", date="", excludes=())
    else:
        price = known.price(shape, "compute", machine.provisioning, machine.zone)
        if not shape.local_ssd_auto:
            rate = known.component("local-ssd-gib", machine.zone)
            price = with_local_ssds(price, local_ssds(machine), rate, spot=machine.provisioning == "spot")
    if price.usd is None and said is not None:
        return replace(price, usd=said, approx=False, rule="as --price says")
    return price


def shape_of(machine: Machine) -> MachineType | None:
    """The catalog's machine; of N1 the shape with the GPUs that are attached. None: it isn't in the catalog."""
    from launcher import catalog

    known = catalog.load()
    shapes = known.machines.get(machine.machine_type, ())
    attached = [
        (last(str(one.get("acceleratorType", ""))), int(one.get("acceleratorCount", 0)))
        for one in machine.request.get("guestAccelerators", ())
    ]
    if len(shapes) > 1:
        return next((one for one in shapes if (known.gpus[one.gpu].accelerator, one.gpus) in attached), None)
    return next(iter(shapes), None)


def attached_disks(machine: Machine) -> list[dict[str, Any]]:
    """The Instance's disks that outlive a stop."""
    return [disk for disk in machine.request.get("disks", ()) if disk.get("type") != "SCRATCH"]


def local_ssds(machine: Machine) -> int:
    """How many local SSDs the Instance lists."""
    return sum(disk.get("type") == "SCRATCH" for disk in machine.request.get("disks", ()))


def has_local_ssd(machine: Machine) -> bool:
    """Whether a stop loses /mnt/localssd: some machine types bring disks without being asked."""
    shape = shape_of(machine)
    return bool(local_ssds(machine)) or (shape is not None and shape.local_ssd_auto)


def usd_so_far(machine: Machine, price: Price, now: float) -> float | None:
    """What it has cost since its last start, without its disk; None where the price is unknown."""
    if machine.status not in BILLED or machine.started is None:
        return 0.0
    return None if price.usd is None else price.usd * max(0.0, now - machine.started) / 3600


def of_machine(disks: Iterable[Disk], machine: Machine) -> tuple[Disk, ...]:
    """Those that are attached to the VM."""
    return tuple(disk for disk in disks if disk.zone == machine.zone and machine.name in disk.users)


def usd_a_month(disks: Iterable[Disk]) -> float | None:
    """What disks cost a month; None where one's price is unknown."""
    from launcher import catalog

    known = catalog.load()
    rates = [(disk, known.disk_price(disk.kind, disk.region)) for disk in disks]
    if any(rate is None for _, rate in rates):
        return None
    return sum(disk.size_gb * rate.usd for disk, rate in rates if rate)


def usd_in_all(machine: Machine, disks: Iterable[Disk]) -> float | None:
    """What a month of the VM as it is now costs, with its disks as far as their price is known; None where that of the
    machine isn't."""
    from launcher.plan.cost import MONTH_HOURS

    disks = list(disks)
    kept = usd_a_month(disks) if disks else None
    if machine.status not in BILLED:
        return kept
    price = price_of(machine).usd
    return None if price is None else MONTH_HOURS * price + (kept or 0.0)

"""What a run may cost at most, held against its cap."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from launcher.catalog import Catalog, Component, Price
from launcher.errors import PlanRefused
from launcher.plan import vm_metadata
from launcher.plan.model import Attempt, Chosen, Context, Place
from launcher.plan.validate import LOCAL_SSD_GIB
from launcher.plan.vertex_request import disk_spec
from launcher.plan.vm_request import boot_disk_of
from launcher.spec.models import JobSpec, Limits
from launcher.text import hourly_price, parse_duration, plural, usd_text

MONTH_HOURS = 730
"""Of an average month, as Google's price lists count."""
BUCKET = "storage in the bucket (soft-deleted checkpoints too)"


def priced(price: Price, limits: Limits) -> Price:
    """Return the catalog's price per node and hour, otherwise that of --price."""
    if price.usd is not None or limits.price is None:
        return price
    said = limits.price
    rule = "as --price says"
    return replace(price, usd=said, approx=False, rule=rule, ceiling=said, ceiling_rule=rule, hard_bound=said)


def with_local_ssds(price: Price, disks: int, rate: Component | None, *, spot: bool) -> Price:
    """Return the price with the requested local SSDs at the region's rate; unknown if that rate is unknown."""
    if not disks:
        return price
    each = None if rate is None else rate.spot if spot else rate.listed
    if rate is None or each is None:
        rule = "no price of local SSDs is known there"
        return replace(price, usd=None, approx=True, rule=rule, ceiling=None, hard_bound=None)
    size = disks * LOCAL_SSD_GIB
    return replace(
        price,
        usd=None if price.usd is None else price.usd + size * each,
        rule=f"{price.rule}, plus {disks} local SSDs",
        excludes=tuple(item for item in price.excludes if item != "local SSD"),
        ceiling=None if price.ceiling is None else price.ceiling + size * rate.listed,
        hard_bound=None if price.hard_bound is None else price.hard_bound + size * rate.listed,
    )


def extras(spec: JobSpec, catalog: Catalog, context: Context, chosen: Chosen, place: Place) -> dict[str, float]:
    """Return the USD per node and hour of what the plan creates in addition to a machine, if its price is known."""
    if context.target == "local" or chosen.machine is None:
        return {}
    on_vertex = context.target == "vertex"
    disk = disk_spec(spec, chosen.machine) if on_vertex else boot_disk_of(spec, chosen.machine)
    month = catalog.disk_price_at_most(disk["bootDiskType"], place.region)
    fee = 1 + catalog.rates["vertex-fee"].usd if on_vertex else 1.0
    found = {} if month is None else {"boot disk": disk["bootDiskSizeGb"] * month / MONTH_HOURS * fee}
    if context.target == "vm" and spec.vm.external_ip:
        found["external address"] = catalog.rates["external-ip"].usd
    return found


def excluded(price: Price, known: dict[str, float], spec: JobSpec, context: Context) -> tuple[str, ...]:
    """Return what the sum excludes."""
    if context.target == "local":
        return ()
    kept = context.target == "vm" and vm_metadata.on_stop(spec, training=context.training) == "stop"
    return (
        *(item for item in price.excludes if item not in known),
        *(["the boot disk after a stop"] if kept else ()),
        *([BUCKET] if context.training else ()),
    )


def sums(attempts: tuple[Attempt, ...], *, nodes: int, hours: float) -> dict[str, float | None]:
    """Return the cost of the most expensive attempt on all nodes, in USD; None if any attempt's price is unknown."""
    return {
        "usd_at_most": dearest(with_extras(one, one.usd_ceiling, nodes * billed_hours(one, hours)) for one in attempts),
        "usd_expected": dearest(with_extras(one, one.usd_per_hour, nodes * hours) for one in attempts),
        "usd_hard_bound": dearest(
            with_extras(one, one.usd_hard_bound, nodes * billed_hours(one, hours) * (1 + one.service_restarts))
            for one in attempts
        ),
    }


def billed_hours(attempt: Attempt, hours: float) -> float:
    """Return the time limit plus the shutdown."""
    return hours + attempt.shutdown_seconds / 3600


def with_extras(attempt: Attempt, usd: float | None, hours: float) -> float | None:
    """Return the USD for so many hours of a node and its extras."""
    return None if usd is None else (usd + sum(attempt.usd_extras.values())) * hours


def dearest(known: Iterable[float | None]) -> float | None:
    """Return the highest; None if one is unknown."""
    found = list(known)
    return None if None in found else max((usd for usd in found if usd is not None), default=None)


def ceiling(attempt: Attempt) -> float:
    """Return the USD per node and hour by the expected ceiling, with extras; 0 if unknown."""
    return with_extras(attempt, attempt.usd_ceiling, 1.0) or 0.0


def check_cap(attempts: tuple[Attempt, ...], spec: JobSpec, *, hours: float) -> None:
    """Refuse a plan that could cost more than `limits.usd`, or whose cost can't be known under a cap.

    Raises:
        PlanRefused: with the sum, and what would fit.
    """
    cap, nodes = spec.limits.usd, spec.machine.nodes
    if cap is None:
        return
    check_known(attempts, spec, cap)
    most = max(attempts, key=lambda attempt: ceiling(attempt) * billed_hours(attempt, hours))
    rate, billed = ceiling(most), billed_hours(most, hours)
    total = rate * nodes * billed
    if total > cap:
        raise PlanRefused(
            f"this run could cost {usd_text(total)}, more than limits.usd ({usd_text(cap)}): "
            f"at most {hourly_price(rate)} ({most.provisioning} in {most.where}, {most.usd_ceiling_rule}) "
            f"x {plural(nodes, 'node')} x {in_hours(most, hours)}",
            fitting(cap, rate * nodes, billed - hours),
            field="limits.usd",
        )


def in_hours(attempt: Attempt, hours: float) -> str:
    """Return `24.04 h (24 h + 150 s of shutdown)`."""
    return f"{billed_hours(attempt, hours):.4g} h ({hours:g} h + {attempt.shutdown_seconds} s of shutdown)"


def check_lease(attempts: tuple[Attempt, ...], spec: JobSpec, *, hours: float) -> None:
    """Refuse a lease beyond the time after which Google itself ends the VM, as nobody could keep it.

    Raises:
        PlanRefused: with what the longer time could cost.
    """
    lease = parse_duration(spec.vm.lease) / 3600 if spec.vm.lease else 0.0
    if lease <= hours:
        return
    most = sums(attempts, nodes=spec.machine.nodes, hours=lease)["usd_at_most"]
    costs = f"at most {usd_text(most)}" if most is not None else "at a price that is unknown"
    raise PlanRefused(
        f"vm.lease: {spec.vm.lease} is more than limits.hours ({hours:g}), after which Google itself ends the VM",
        f"Raise the limit ({costs}): --hours {lease:g}; or shorten the lease.",
        field="vm.lease",
    )


def check_known(attempts: tuple[Attempt, ...], spec: JobSpec, cap: float) -> None:
    """Check that every price has an upper bound, as a cap needs.

    Raises:
        PlanRefused: names the first attempt without one.
    """
    unknown = next((attempt for attempt in attempts if attempt.usd_ceiling is None), None)
    if unknown:
        raise PlanRefused(
            f"limits.usd is {usd_text(cap)}, but the price of {unknown.machine_type} ({unknown.provisioning}) "
            f"in {unknown.where} is unknown",
            "Say it with --price USD (per hour and node), choose another region, or leave limits.usd out.",
            field="limits.usd",
        )
    if spec.vertex.reduction_server:
        raise PlanRefused(
            f"limits.usd is {usd_text(cap)}, but the price of the reduction servers "
            f"({spec.vertex.reduction_server.machine_type}) is unknown",
            "Leave limits.usd or vertex.reduction_server out.",
            field="limits.usd",
        )


def fitting(cap: float, usd_per_hour: float, shutdown_hours: float) -> str:
    """Return the hint: how many hours the cap pays for."""
    hours = int((cap / usd_per_hour - shutdown_hours) * 100) / 100
    pays = f"{usd_text(cap)} pays for {hours:g} h: --hours {hours:g}, a" if hours >= 0.1 else "A"
    return f"{pays} higher --usd, or cheaper regions or provisioning."

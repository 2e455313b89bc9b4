"""What a run may cost at most, held against its cap."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.catalog import Component, Price
from launcher.errors import PlanRefused
from launcher.plan.model import Attempt
from launcher.plan.names import seconds
from launcher.plan.refusals import LOCAL_SSD_GIB
from launcher.spec.models import JobSpec, Limits


def priced(price: Price, limits: Limits) -> Price:
    """The catalog's price of a node and hour, else the one that the user says."""
    if price.usd is None and limits.price is not None:
        return replace(price, usd=limits.price, approx=False, rule="as --price says")
    return price


def with_local_ssds(price: Price, disks: int, rate: Component | None, *, spot: bool) -> Price:
    """The price with local SSDs that were asked for, at the region's rate; unknown as soon as that rate is."""
    if not disks or price.usd is None:
        return price
    each = None if rate is None else rate.spot if spot else rate.listed
    if each is None:
        return replace(price, usd=None, approx=True, rule="no price of local SSDs is known there")
    return replace(
        price,
        usd=price.usd + disks * LOCAL_SSD_GIB * each,
        rule=f"{price.rule}, plus {disks} local SSDs",
        excludes=tuple(item for item in price.excludes if item != "local SSD"),
    )


def at_most(attempts: tuple[Attempt, ...], *, nodes: int, hours: float) -> float | None:
    """The dearest attempt's price x nodes x hours in USD; None as soon as one price is unknown."""
    prices = [attempt.usd_per_hour for attempt in attempts]
    if not prices or None in prices:
        return None
    return max(price for price in prices if price is not None) * nodes * hours


def check_cap(attempts: tuple[Attempt, ...], spec: JobSpec, *, hours: float) -> None:
    """Refuse a plan that could cost more than `limits.usd`, or whose cost can't be known under a cap.

    Raises:
        PlanRefused: with the sum, and what would fit.
    """
    cap, nodes = spec.limits.usd, spec.machine.nodes
    if cap is None:
        return
    check_known(attempts, spec, cap)
    dearest = max(attempts, key=lambda attempt: attempt.usd_per_hour or 0.0)
    price = dearest.usd_per_hour or 0.0
    total = price * nodes * hours
    if total > cap:
        raise PlanRefused(
            f"this run could cost ${total:,.2f}, more than limits.usd (${cap:,.2f}): "
            f"${price:,.2f}/h ({dearest.provisioning} in {dearest.where}) "
            f"x {nodes} {'node' if nodes == 1 else 'nodes'} x {hours:g} h",
            fitting(cap, price * nodes),
        )


def check_lease(attempts: tuple[Attempt, ...], spec: JobSpec, *, hours: float) -> None:
    """Refuse a lease beyond the time after which Google itself ends the VM, as nobody could keep it.

    Raises:
        PlanRefused: with what the longer time could cost.
    """
    lease = seconds(spec.vm.lease) / 3600 if spec.vm.lease else 0.0
    if lease <= hours:
        return
    most = at_most(attempts, nodes=spec.machine.nodes, hours=lease)
    costs = f"at most ${most:,.2f}" if most is not None else "at a price that is unknown"
    raise PlanRefused(
        f"vm.lease: {spec.vm.lease} is more than limits.hours ({hours:g}), after which Google itself ends the VM",
        f"Raise the limit ({costs}): --hours {lease:g}; or shorten the lease.",
    )


def check_known(attempts: tuple[Attempt, ...], spec: JobSpec, cap: float) -> None:
    """Under a cap every price must be known.

    Raises:
        PlanRefused: with the first that isn't.
    """
    unknown = next((attempt for attempt in attempts if attempt.usd_per_hour is None), None)
    if unknown:
        raise PlanRefused(
            f"limits.usd is ${cap:,.2f}, but the price of {unknown.machine_type} ({unknown.provisioning}) "
            f"in {unknown.where} is unknown",
            "Say it with --price USD (per hour and node), choose another region, or leave limits.usd out.",
        )
    if spec.vertex.reduction_server:
        raise PlanRefused(
            f"limits.usd is ${cap:,.2f}, but the price of the reduction servers "
            f"({spec.vertex.reduction_server.machine_type}) is unknown",
            "Leave limits.usd or vertex.reduction_server out.",
        )


def fitting(cap: float, usd_per_hour: float) -> str:
    """The hint: how many hours the cap pays for."""
    hours = int(cap / usd_per_hour * 100) / 100
    pays = f"${cap:,.2f} pays for {hours:g} h: --hours {hours:g}, a" if hours >= 0.1 else "A"
    return f"{pays} higher --usd, or cheaper regions or provisioning."

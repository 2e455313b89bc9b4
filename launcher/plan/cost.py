"""What a run may cost at most, held against its cap."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.catalog import Price
from launcher.errors import PlanRefused
from launcher.plan.model import Attempt
from launcher.spec.models import Limits


def priced(price: Price, limits: Limits) -> Price:
    """The catalog's price of a node and hour, else the one that the user says."""
    if price.usd is None and limits.price is not None:
        return replace(price, usd=limits.price, approx=False, rule="as --price says")
    return price


def at_most(attempts: tuple[Attempt, ...], *, nodes: int, hours: float) -> float | None:
    """The dearest attempt's price x nodes x hours in USD; None as soon as one price is unknown."""
    prices = [attempt.usd_per_hour for attempt in attempts]
    if not prices or None in prices:
        return None
    return max(price for price in prices if price is not None) * nodes * hours


def check_cap(attempts: tuple[Attempt, ...], limits: Limits, *, nodes: int, hours: float) -> None:
    """Refuse a plan that could cost more than `limits.usd`, or whose cost can't be known under a cap.

    Raises:
        PlanRefused: with the sum, and what would fit.
    """
    if limits.usd is None:
        return
    unknown = next((attempt for attempt in attempts if attempt.usd_per_hour is None), None)
    if unknown:
        raise PlanRefused(
            f"limits.usd is ${limits.usd:,.2f}, but the price of {unknown.machine_type} ({unknown.provisioning}) "
            f"in {unknown.zone or unknown.region} is unknown",
            "Say it with --price USD (per hour and node), choose another region, or leave limits.usd out.",
        )
    dearest = max(attempts, key=lambda attempt: attempt.usd_per_hour or 0.0)
    price = dearest.usd_per_hour or 0.0
    total = price * nodes * hours
    if total > limits.usd:
        raise PlanRefused(
            f"this run could cost ${total:,.2f}, more than limits.usd (${limits.usd:,.2f}): "
            f"${price:,.2f}/h ({dearest.provisioning} in {dearest.zone or dearest.region}) "
            f"x {nodes} {'node' if nodes == 1 else 'nodes'} x {hours:g} h",
            fitting(limits.usd, price * nodes),
        )


def fitting(usd: float, usd_per_hour: float) -> str:
    """The hint: how many hours the cap pays for."""
    hours = int(usd / usd_per_hour * 100) / 100
    return f"${usd:,.2f} pays for {hours:g} h: --hours {hours:g}, a higher --usd, or cheaper regions or provisioning."

"""Short texts about a VM: state, price, end."""

from __future__ import annotations

from launcher.catalog import Price
from launcher.cli.ui.text import local_moment
from launcher.jobs.vm import VmInstance
from launcher.text import hourly_price, rough_duration, usd_text

STATES = {"TERMINATED": "STOPPED"}
"""Compute Engine's states that are shown under another name."""


def vm_state(machine: VmInstance) -> str:
    """Return the state as it is shown: `RUNNING`, `STOPPED` …"""
    return STATES.get(machine.status, machine.status)


def price_and_end(machine: VmInstance, price: Price, now: float) -> str:
    """Return a VM's price and end: `$2.00/h, at most $24.00, stops itself 22:40`.

    The upper bound counts from the last start to the limit that Google enforces. If the lease ends earlier, the cost at
    its end follows.
    """
    parts = [hourly_price(price.usd, approx=price.approx)]
    limit = machine.limit_seconds
    if price.usd is not None and limit:
        parts.append(f"at most {usd_text(price.usd * limit / 3600, price.approx)}")
    until, ceiling = machine.lease_until, machine.ceiling
    if until is None:  # it is not running: its end after its next start
        known = [float(seconds) for seconds in (machine.parameters.get("lease_seconds"), limit) if seconds]
        end = f"{ends_itself(machine)} {rough_duration(min(known))} after its start" if known else "never stops itself"
        return ", ".join([*parts, end])
    if until < now:
        return ", ".join([*parts, f"should have ended {local_moment(until, now)}"])
    ends = f"{ends_itself(machine)} {local_moment(until, now)}"
    if price.usd is not None and machine.started is not None and (ceiling is None or until < ceiling):
        ends += f" ({usd_text(price.usd * (until - machine.started) / 3600, price.approx)} by then)"
    return ", ".join([*parts, ends])


def ends_itself(machine: VmInstance) -> str:
    """Return what the VM does at the end of its lease: `stops itself` or `deletes itself`."""
    scheduling = machine.request.get("scheduling", {})
    how = machine.parameters.get("on_stop") or scheduling.get("instanceTerminationAction", "stop")
    return "deletes itself" if how.lower() == "delete" else "stops itself"

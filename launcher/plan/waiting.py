"""How long a run may wait for machines: each attempt, and all attempts together. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from launcher.plan.model import Attempt, Target
from launcher.spec.models import Limits
from launcher.text import parse_duration

FLEX_START: Final = 6 * 3600
"""Default for flex-start, whose purpose is to queue. Vertex AI's own default is 24 h (Scheduling.max_wait_duration),
which in 17 regions is more than two weeks."""
OTHERS: Final = 3600
"""Default for spot, standard and reservations. Google grants or refuses these within minutes (Vertex AI retries a
stockout 3 times for standard, 6 times for Spot); what still waits after an hour lacks quota or capacity."""
LEAST: Final = 90
"""Seconds: the shortest wait that Compute Engine accepts for flex-start, and the shortest for which launch makes an
attempt."""
FLEX_START_VM_MOST: Final = 7200
"""Seconds: the longest wait that Compute Engine accepts for flex-start (params.requestValidForDuration)."""


def of_attempt(limits: Limits, target: Target, provisioning: str) -> int | None:
    """Return the seconds that one attempt may wait for machines; None for a rehearsal."""
    if target == "local":
        return None
    kind = provisioning.partition(":")[0]
    own = parse_duration(limits.wait) if limits.wait else FLEX_START if kind == "flex-start" else OTHERS
    found = min(own, parse_duration(limits.wait_total)) if limits.wait_total else own
    return flex_start_vm(found) if target == "vm" and kind == "flex-start" else found


def flex_start_vm(wanted: int) -> int:
    """Return the wait, within what Compute Engine accepts for flex-start."""
    return min(max(wanted, LEAST), FLEX_START_VM_MOST)


def in_total(attempts: Iterable[Attempt], total: int | None) -> int | None:
    """Return the seconds that all attempts may wait together until the run first has machines; None for a rehearsal."""
    waits = [one.wait_seconds for one in attempts if one.wait_seconds is not None]
    if not waits:
        return None
    return sum(waits) if total is None else min(total, sum(waits))

"""Compute how long a run may wait for machines: in each attempt, and over all attempts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from launcher.plan.model import Attempt, Target
from launcher.spec.models import Limits
from launcher.text import parse_duration

DEFAULT_FLEX_START_WAIT: Final = 6 * 3600
"""Default for flex-start, whose purpose is to queue. Vertex AI's own default is 24 h (Scheduling.max_wait_duration),
which in 17 regions is more than two weeks."""
DEFAULT_WAIT: Final = 3600
"""Default for spot, standard and reservations. Google grants or refuses these within minutes (Vertex AI retries a
stockout 3 times for standard, 6 times for Spot); a job that still waits after an hour lacks quota or capacity."""
MIN_WAIT: Final = 90
"""Seconds: the shortest wait that Compute Engine accepts for flex-start, and the shortest for which launch makes an
attempt."""
MAX_FLEX_START_VM_WAIT: Final = 7200
"""Seconds: the longest wait that Compute Engine accepts for flex-start (params.requestValidForDuration)."""


def attempt_wait(limits: Limits, target: Target, provisioning: str) -> int | None:
    """Return the seconds that one attempt may wait for machines; None for a rehearsal."""
    if target == "local":
        return None
    kind = provisioning.partition(":")[0]
    default = DEFAULT_FLEX_START_WAIT if kind == "flex-start" else DEFAULT_WAIT
    wanted = parse_duration(limits.wait) if limits.wait else default
    wait = min(wanted, parse_duration(limits.wait_total)) if limits.wait_total else wanted
    return clamp_flex_start_vm_wait(wait) if target == "vm" and kind == "flex-start" else wait


def clamp_flex_start_vm_wait(wait: int) -> int:
    """Return the nearest wait, in seconds, that Compute Engine accepts for flex-start."""
    return min(max(wait, MIN_WAIT), MAX_FLEX_START_VM_WAIT)


def total_wait(attempts: Iterable[Attempt], total: int | None) -> int | None:
    """Return the seconds that all attempts may wait together until the run first has machines; None for a rehearsal."""
    waits = [attempt.wait_seconds for attempt in attempts if attempt.wait_seconds is not None]
    if not waits:
        return None
    return sum(waits) if total is None else min(total, sum(waits))

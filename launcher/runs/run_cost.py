"""Compute what a job has cost so far, from its request and the catalog's prices."""

from __future__ import annotations

from launcher import catalog
from launcher.jobs.job import Job
from launcher.services import request


def job_usd(job: Job, now: float) -> float | None:
    """Return the cost of a job's machines so far in USD, without disks; None: the price is unknown.

    It is 0 before they started, and on this machine.
    """
    if job.started is None or job.is_here:
        return 0.0
    price = usd_per_hour(job)
    return None if price is None else price * max(0.0, (job.ended or now) - job.started) / 3600


def usd_per_hour(job: Job) -> float | None:
    """Return the price of all nodes of a job, or None if it is unknown."""
    requested, known = request.read(job.request), catalog.load()
    shapes = known.machines.get(requested.machine_type, ())
    shape = next((candidate for candidate in shapes if candidate.gpus == requested.gpus), None) or (
        shapes[0] if len(shapes) == 1 else None
    )
    if shape is None:
        return None
    price = known.price(shape, "compute" if job.zone else "vertex", requested.provisioning, job.place)
    return None if price.usd is None else price.usd * requested.nodes

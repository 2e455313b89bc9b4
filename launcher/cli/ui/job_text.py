"""Short texts about a job's request."""

from __future__ import annotations

import re

from launcher.jobs.job import RESOURCE, Job
from launcher.services import request
from launcher.services.vertex import console_url as of_vertex


def provisioning_of(job: Job) -> str:
    """Return `standard`, `spot`, `flex-start` or `reservation`."""
    return request.read(job.request).provisioning.partition(":")[0]


def machine_of(job: Job) -> str:
    """Return `2 × a3-highgpu-8g`, without a number for one node."""
    requested = request.read(job.request)
    name = requested.machine_type or "a machine"
    return f"{requested.nodes} × {name}" if requested.nodes > 1 else name


def place_of(job: Job) -> str:
    """Return the zone or region of a job, or `this machine`."""
    return "this machine" if job.is_here else job.place


def console_url(job: Job) -> str:
    """Return the URL of the job's page in the console; empty: it has none."""
    if not re.fullmatch(RESOURCE, job.name):
        return ""
    project = job.name.split("/")[1]
    if job.zone:
        page = f"https://console.cloud.google.com/compute/instancesDetail/zones/{job.zone}/instances"
        return f"{page}/{job.request.get('name') or job.id}?project={project}"
    return of_vertex(job)

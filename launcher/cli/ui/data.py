"""Jobs, attempts, progress and VMs as JSON data for scripts (docs/output.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from launcher.cli.ui.job_text import console_url, machine_of, provisioning_of
from launcher.cli.ui.story_text import attempt_text
from launcher.cli.ui.vm_text import ends_itself
from launcher.jobs.job import Job
from launcher.jobs.orphans import Disk
from launcher.jobs.vm import VmInstance
from launcher.runs.attempts import AttemptEntry
from launcher.runs.find import FoundRun
from launcher.runs.run import RunStatus, status_of
from launcher.runs.run_story import RunStory, story_of
from launcher.runs.story import total_usd
from launcher.services import request
from launcher.services.compute.vm_cost import disks_of, disks_usd_per_month, price_of, usd_so_far


def job_data(run: str, job: Job) -> dict[str, Any]:
    """Return a job for scripts; times in Unix seconds."""
    return {
        "run": run,
        "state": job.state,
        "job": None if job.is_here else job.name,
        "region": job.region,
        "zone": job.zone,
        "machine": machine_of(job) if request.read(job.request).machine_type else None,
        "provisioning": provisioning_of(job) or None,
        "image": request.read(job.request).image or None,
        "output": request.run_folder(job.request),
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "error": {"code": job.error.code, "message": job.error.message} if job.error else None,
        "console": console_url(job) or None,
        "labels": dict(job.labels),
    }


def attempt_data(entry: AttemptEntry) -> dict[str, Any]:
    """Return an attempt for scripts; `seconds` that it ran, and its end in Unix seconds (null: not recorded)."""
    data: dict[str, Any] = msgspec.to_builtins(entry)
    end = entry.end
    data |= {"seconds": end.billed if end else None, "ended": end.time if end else None}
    return {name: value for name, value in data.items() if name != "writer"}


def status_data(status: RunStatus, story: RunStory) -> dict[str, Any]:
    """Return a run for scripts, with its story, progress, GPUs and jobs; cost and upper bound in USD."""

    return {
        **job_data(status.run, status.job),
        "progress": msgspec.to_builtins(status.progress),
        "nodes": [node.to_dict() for node in status.nodes],
        "attempts": [attempt_data(entry) for entry in status.attempts],
        "jobs": [job_data(status.run, job) for job in status.jobs if not job.is_here],
        "story": [*map(attempt_text, story.chapters)],
        "usd": total_usd(story.chapters) if any(attempt.place for attempt in story.chapters) else None,
        "usd_at_most": story.cap,
        "to_do": story.advice,
    }


def run_document(run: FoundRun) -> dict[str, Any]:
    """Return a run for scripts, as `launch status` prints it; its folder is read."""
    status = status_of(run)
    return status_data(status, story_of(run, status.attempts))


def machine_data(machine: VmInstance, disks: Iterable[Disk], now: float) -> dict[str, Any]:
    """Return a VM for scripts; times in Unix seconds, `usd_per_hour` and `usd_so_far` without its disks."""
    price, own = price_of(machine), disks_of(machine, disks)
    return {
        "name": machine.name,
        "id": machine.id,
        "run": machine.run if machine.trains else None,
        "state": machine.status,
        "machine": machine.machine_type,
        "provisioning": machine.provisioning,
        "zone": machine.zone,
        "created": machine.created,
        "started": machine.started,
        "stopped": machine.stopped,
        "usd_per_hour": price.usd,
        "usd_approx": price.approx,
        "usd_so_far": usd_so_far(machine, price, now),
        "usd_per_month_of_disks": disks_usd_per_month(own) if own else None,
        "lease_until": machine.lease_until,
        "ceiling": machine.ceiling,
        "at_the_end": ends_itself(machine),
        "internal_ip": machine.internal_ip or None,
        "external_ip": machine.external_ip or None,
        "disks": [{"name": disk.name, "kind": disk.kind, "gb": disk.size_gb} for disk in own],
        "labels": dict(machine.labels),
        "resource": machine.resource,
    }

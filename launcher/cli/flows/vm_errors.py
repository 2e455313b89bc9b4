"""Errors for requests about an existing VM that Compute Engine refused, each with a fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.errors import LaunchError, NoCapacity, NotAuthorised, UsageError

if TYPE_CHECKING:
    from launcher.diagnosis import Diagnosis
    from launcher.jobs.vm import VmInstance
    from launcher.services.base import CreateRefused


def refusal_error(error: CreateRefused, machine: VmInstance) -> LaunchError:
    """Return the error that a refusal stands for."""
    from launcher.diagnosis import RequestContext, diagnose_refusal, exit_code

    context = RequestContext(
        project=machine.project,
        region=machine.region,
        provisioning=machine.provisioning,
        zone=machine.zone,
        machine_type=machine.machine_type,
    )
    diagnosis = diagnose_refusal(error.refusal, context)
    if diagnosis.kind == "stockout":
        return no_capacity(machine, diagnosis)
    kinds = (UsageError, NotAuthorised, NoCapacity)
    kind = next((one for one in kinds if one.exit_code == exit_code(diagnosis)), LaunchError)
    return kind(f"{machine.name}: {diagnosis.cause}", diagnosis.fix)


def no_capacity(machine: VmInstance, diagnosis: Diagnosis) -> NoCapacity:
    """Return the error for a stockout: a stopped VM can only start in the zone of its disk."""
    named = f" (Compute Engine names {', '.join(diagnosis.zones)})" if diagnosis.zones else ""
    return NoCapacity(
        f"{machine.zone}, where the disk of {machine.name} is, has no capacity for {machine.machine_type}",
        f"launch vm start {machine.name}\n    tries again later\n"
        f"launch vm --name NAME --zone ZONE …\n    creates a VM in another zone{named}; to copy this VM's disk:\n"
        f"    gcloud compute machine-images create NAME --source-instance={machine.name} "
        f"--source-instance-zone={machine.zone}",
    )

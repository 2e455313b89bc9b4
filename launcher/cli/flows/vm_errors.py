"""What Compute Engine has refused to do with a VM that is there, as an error with a way on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.errors import LaunchError, NoCapacity, NotAuthorised, UsageError

if TYPE_CHECKING:
    from launcher.backend.base import CreateRefused
    from launcher.diagnosis import Diagnosis
    from launcher.jobs.vm import Machine


def explained(error: CreateRefused, machine: Machine) -> LaunchError:
    """By what the refusal means."""
    from launcher.diagnosis import Tried, exit_code, of_refusal

    tried = Tried(
        project=machine.project,
        region=machine.region,
        provisioning=machine.provisioning,
        zone=machine.zone,
        machine_type=machine.machine_type,
    )
    diagnosis = of_refusal(error.refusal, tried)
    if diagnosis.kind == "stockout":
        return no_room(machine, diagnosis)
    kinds = (UsageError, NotAuthorised, NoCapacity)
    kind = next((one for one in kinds if one.exit_code == exit_code(diagnosis)), LaunchError)
    return kind(f"{machine.name}: {diagnosis.cause}", diagnosis.fix)


def no_room(machine: Machine, diagnosis: Diagnosis) -> NoCapacity:
    """A stopped VM can start nowhere but where its disk is."""
    named = f" (Compute Engine names {', '.join(diagnosis.zones)})" if diagnosis.zones else ""
    return NoCapacity(
        f"{machine.zone} has no {machine.machine_type} for {machine.name} just now, and its disk is in that zone",
        f"launch vm start {machine.name}\n    again, later\n"
        f"launch vm --name NAME --zone ZONE …\n    a new one in another zone{named}; this one's disk goes there by\n"
        f"    gcloud compute machine-images create NAME --source-instance={machine.name} "
        f"--source-instance-zone={machine.zone}",
    )

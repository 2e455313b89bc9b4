"""What of ours is there without need."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL
from launcher.jobs.orphans import FORGOTTEN_SECONDS, LATE_SECONDS, Disk, orphan_reason, without_vm
from launcher.jobs.vm import VmInstance

NOW = 1_700_000_000.0
WORK = VmInstance(
    id="7",
    name="dev",
    project="p",
    zone="us-central1-a",
    status="RUNNING",
    machine_type="g2-standard-24",
    provisioning="standard",
    created=NOW - 90_000,
    started=NOW - 7200,
    labels={RUN_LABEL: "dev"},
    parameters={"lease_seconds": 3600},
    limit_seconds=43_200,
)
TRAIN = replace(WORK, labels={RUN_LABEL: "dev", IDENTITY_LABEL: "x"}, parameters={})
DISK = Disk(name="old", zone="us-central1-a", kind="pd-balanced", size_gb=200, created=0, labels={RUN_LABEL: "old"})


@pytest.mark.parametrize(
    ("machine", "ended", "why"),
    [
        (WORK, None, "still running after its lease ended: its watchdog failed"),
        (replace(WORK, started=NOW - 3600 - LATE_SECONDS), None, None),
        (replace(WORK, lease_moved_to=NOW + 60), None, None),
        (replace(WORK, lease_moved_to=NOW - LATE_SECONDS - 1), None, "still running after its lease ended"),
        (replace(WORK, status="STOPPING"), None, None),
        (replace(WORK, parameters={}), None, None),
        (replace(WORK, status="TERMINATED", stopped=NOW - FORGOTTEN_SECONDS), None, None),
        (replace(WORK, status="TERMINATED", stopped=NOW - 12 * 86_400), None, "stopped for 12 days"),
        (replace(WORK, status="STOPPED", created=NOW - 30 * 86_400), None, "stopped for 30 days"),
        (TRAIN, None, None),
        (TRAIN, NOW - LATE_SECONDS, None),
        (TRAIN, NOW - LATE_SECONDS - 1, "its run has ended, but the VM still exists"),
        (replace(TRAIN, status="TERMINATED"), NOW, "its run has ended, but the VM still exists"),
        (replace(TRAIN, status="TERMINATED"), None, "stopped, but its run folder records no end"),
        (replace(TRAIN, status="STOPPING"), None, None),
    ],
)
def test_the_reason_why_a_vm_is_an_orphan(machine: VmInstance, ended: float | None, why: str | None) -> None:
    found = orphan_reason(machine, NOW, ended)
    assert found is None if why is None else found and found.startswith(why)


def test_a_disk_without_a_vm() -> None:
    used = replace(DISK, name="used", users=("dev",))
    theirs = replace(DISK, name="theirs", labels={})
    being_made = replace(DISK, name="dev")
    second = replace(DISK, name="dev-1")
    elsewhere = replace(DISK, name="dev", zone="us-central1-b")
    assert without_vm([DISK, used, theirs, being_made, second, elsewhere], [WORK]) == (DISK, elsewhere)

"""`launch vm stop`, `start` and `delete`."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from launcher.clock import Clock
from launcher.testing.googlecloud import Fault, Reset, Status
from tests.cli.vms import HOUR, RUN, Person, Vms

GET = "compute.instances.get"


def test_stop_and_start(vms: Vms) -> None:
    vms.make("dev", lease=4 * HOUR)
    ran = vms.launch("stop", "dev")
    assert ran.out.splitlines()[0] == "dev is stopped; its disk (200 GB pd-balanced) still costs ≈$20.00 a month"
    assert "launch vm start dev" in ran.out
    assert vms.status("dev") == "TERMINATED"
    assert vms.launch("stop", "dev").out.startswith("dev is already stopped; its disk (200 GB")
    vms.clock.advance(3 * HOUR)
    ran = vms.launch("start", "dev")
    assert ran.out.splitlines()[0].startswith("dev is running: $2.00/h, at most $24.01, stops itself 05:")
    assert vms.status("dev") == "RUNNING"
    assert vms.launch("start", "dev").out.startswith("dev is already running: $2.00/h")


def test_stop_warns_that_local_ssds_are_lost(vms: Vms) -> None:
    vms.make("dev", ssds=2)
    assert "/mnt/localssd will be lost" in vms.launch("stop", "dev").err
    vms.make("big", machine="a3-highgpu-2g", model="SPOT")
    assert "/mnt/localssd will be lost" in vms.launch("stop", "big").err
    vms.make("plain")
    assert "/mnt/localssd" not in vms.launch("stop", "plain").err


def test_start_waits_for_a_stopping_vm(vms: Vms) -> None:
    machine = vms.make("dev")
    vms.compute.stop(machine, discard_local_ssd=False)
    assert "is already stopping" in vms.launch("stop", "dev").err
    vms.launch("start", "dev")
    vms.compute.stop(machine, discard_local_ssd=False)
    assert "it will be started afterwards" in vms.launch("start", "dev").err
    assert vms.status("dev") == "RUNNING"


def test_start_waits_for_a_starting_vm(vms: Vms) -> None:
    machine = vms.make("dev")
    vms.launch("stop", "dev")
    vms.compute.start(machine)
    assert vms.status("dev") == "PROVISIONING"
    assert vms.launch("start", "dev").out.startswith("dev is running: ")
    assert len([path for path in vms.asked("POST") if path.endswith("/start")]) == 1


def test_start_without_capacity_fails_with_a_hint(vms: Vms) -> None:
    vms.make("dev")
    vms.launch("stop", "dev")
    vms.cloud.compute.capacity.out("us-central1-a", "g2-*")
    ran = vms.launch("start", "dev", code=5)
    assert "us-central1-a, where the disk of dev is, has no capacity for g2-standard-24" in ran.err
    assert "launch vm start dev\n    tries again later" in ran.err
    assert vms.status("dev") == "TERMINATED"


def test_a_quota_error_is_not_called_a_missing_role(vms: Vms) -> None:
    vms.make("dev")
    vms.launch("stop", "dev")
    vms.cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")
    ran = vms.launch("start", "dev", code=5)
    assert "add-iam-policy-binding" not in ran.err
    assert "NVIDIA_L4_GPUS" in ran.err


def test_stop_succeeds_if_googles_time_is_unavailable(vms: Vms) -> None:
    vms.make("dev")
    vms.cloud.faults.add(Fault("compute.projects.get", Reset(), times=None))
    assert vms.launch("stop", "dev", "-o", "json").out
    assert vms.status("dev") == "TERMINATED"


def test_start_names_spot_provisioning(vms: Vms) -> None:
    vms.make("dev", model="SPOT")
    vms.launch("stop", "dev")
    assert "may preempt at any time" in vms.launch("start", "dev").err


@pytest.mark.parametrize("command", ["stop", "start", "delete", "extend"])
def test_a_vm_that_trains_is_left_to_its_run(vms: Vms, command: str) -> None:
    vms.train()
    flags = {"delete": ["--yes"], "extend": ["--lease", "4h"]}.get(command, [])
    ran = vms.launch(command, RUN, *flags, code=2)
    assert f"{RUN} runs the job of {RUN}: " in ran.err
    assert (f"launch cancel {RUN}" if command != "start" else f"launch vm SPEC --run --resume {RUN}") in ran.err
    assert vms.status(RUN) == "RUNNING"


def test_delete_asks_for_confirmation(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    vms.make("dev")
    assert "--yes" in vms.launch("delete", "dev", code=2).err
    monkeypatch.setattr(sys, "stdin", Person("n\n"))
    ran = vms.launch("delete", "dev", code=1)
    assert (
        "Delete dev (g2-standard-24 in us-central1-a, RUNNING)?\nAll data on its boot disk (200 GB) will be lost."
        in ran.err
    )
    assert "dev was not deleted" in ran.err
    monkeypatch.setattr(sys, "stdin", Person("\n"))
    vms.launch("delete", "dev", code=1)
    assert vms.cloud.compute.names() == ["dev"]
    assert not vms.asked("DELETE")
    monkeypatch.setattr(sys, "stdin", Person("y\n"))
    assert vms.launch("delete", "dev").out == "dev was deleted\n"
    assert vms.cloud.compute.names() == []


def test_delete_names_the_disks_that_remain(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    vms.make("dev", auto_delete=False)
    monkeypatch.setattr(sys, "stdin", Person("y\n"))
    assert "Its boot disk (200 GB) is kept and billed." in vms.launch("delete", "dev").err


def test_deleting_a_deleted_vm_succeeds(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vms.launch("delete", "dev", "--yes").out == "nothing to do: no VM dev in project my-project\n"
    vms.make("dev")
    assert "Did you mean dev?" in vms.launch("delete", "devv", "--yes", code=2).err
    vms.cloud.faults.add(Fault("compute.instances.delete", Status(404), times=1))
    assert vms.launch("delete", "dev", "--yes").out == "dev was already deleted\n"


def test_another_users_vm_is_never_changed(vms: Vms) -> None:
    vms.make("theirs", labels={"team": "vision"})
    for command, flags in (("delete", ["--yes"]), ("stop", []), ("start", []), ("extend", ["--lease", "1h"])):
        vms.launch(command, "theirs", *flags, code=0 if command == "delete" else 2)
    assert vms.status("theirs") == "RUNNING"
    assert not vms.asked("DELETE")


def test_a_training_vm_whose_run_has_ended_is_deleted(vms: Vms) -> None:
    vms.end(vms.train())
    assert vms.launch("delete", RUN, "--yes").out == f"{RUN} was deleted\n"


def test_an_outage_is_reported_and_waited_out(vms: Vms) -> None:
    vms.make("dev")
    vms.cloud.compute.pace = replace(vms.cloud.compute.pace, stop=90)
    vms.cloud.faults.add(Fault("compute.zoneOperations.get", Status(503), times=30))
    ran = vms.launch("stop", "dev")
    assert "temporarily unavailable, retrying" in ran.err
    assert ran.out.startswith("dev is stopped;")


def test_waiting_has_a_timeout(vms: Vms) -> None:
    vms.make("dev")
    vms.cloud.compute.pace = replace(vms.cloud.compute.pace, stop=7200)
    ran = vms.launch("stop", "dev", code=6)
    assert "still waiting for Compute Engine (20 s)" in ran.err
    assert "after 15 minutes" in ran.err


def test_ctrl_c_undoes_nothing(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    vms.make("dev")

    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.clock.REAL", Clock(vms.clock, sleep))
    assert "launch vm status dev shows its progress" in vms.launch("stop", "dev", code=130).err
    vms.clock.advance(60)
    assert vms.status("dev") == "TERMINATED"


def test_a_training_vm_with_an_unreadable_folder_is_not_deleted(vms: Vms) -> None:
    vms.train()
    vms.cloud.faults.add(Fault("storage.*", Status(403), times=None))
    ran = vms.launch("delete", RUN, "--yes", code=1)
    assert f"cannot check whether {RUN} still runs a job" in ran.err
    assert f"gcloud compute instances delete {RUN} --zone=us-central1-a --project=my-project" in ran.err
    assert vms.status(RUN) == "RUNNING"

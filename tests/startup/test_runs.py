"""The startup script run from its first line to the end of the VM."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import Fault, Reset, Status
from tests.plan.planning import request
from tests.startup.world import ZONE, ended, in_own_network, wait_until, world

TRAINING: dict[str, Any] = {"provisioning": ["spot"], "output": "gs://b-b/runs", "zones": [ZONE]}


def training(**fields: Any) -> dict[str, Any]:
    """A VM that trains."""
    return request("vm", world={"run_id": "job-1"}, **{**TRAINING, "machine": {"type": "l4", "gpus": 2}, **fields})


@pytest.mark.parametrize("code", [0, 1, 75])
@in_own_network
def test_the_container_ends_the_record_is_written_and_the_vm_is_deleted(tmp_path: Path, code: int) -> None:
    with world(tmp_path, training()) as vm:
        vm.write("docker/exit", str(code))
        assert vm.boot() == 0, vm.serial
        assert vm.is_gone
        assert vm.record
        times = vm.record.pop("started", 0), vm.record["ended"]
        assert 0 < times[0] < times[1]
        record = {key: value for key, value in vm.record.items() if key not in ("started", "ended")}
        assert record == {"exit": code, "reason": "", "name": "job-1", "zone": ZONE, "cleanup": ""}
        assert vm.states == ["booting", "driver", "pull", "running", "ended"]
        assert vm.docker("pull") == [["--quiet", vm.told["image"]]]
        (words,) = vm.docker("run")
        assert words[: words.index("--env")] == [
            *("--detach", "--name", "launch", "--gpus", "all", "--ipc=host", "--network", "host"),
            *("--ulimit", "memlock=-1", "--stop-timeout", "28"),
            *("--log-driver", "json-file", "--log-opt", "max-size=50m", "--log-opt", "max-file=2"),
        ]
        assert not vm.is_off
        deleted = [one for one in vm.cloud.requests if one.method == "DELETE"]
        assert [one.path.rpartition("/")[2] for one in deleted] == [vm.number]


@in_own_network
def test_a_vm_that_is_told_to_stop_lets_its_job_save(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        process = vm.start()
        with ended(process):
            wait_until(lambda: "running" in vm.states)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: vm.is_gone)
        assert vm.docker("stop") == [["-t", "28", "launch"]]
        assert vm.end == (75, "")


@in_own_network
def test_a_job_that_does_not_leave_in_time_was_stopped_and_has_not_run_out_of_memory(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        killed = 'printf 137 >"$WORLD/docker/exit"'
        vm.program("docker", f'[[ $1 != stop ]] || {{ {killed}; exit; }}; exec python3 "$WORLD/docker.py" "$@"')
        process = vm.start()
        with ended(process):
            wait_until(lambda: "running" in vm.states)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: vm.is_gone)
        assert vm.end == (143, "")


@in_own_network
def test_told_to_stop_before_its_container_runs_it_leaves_at_once(tmp_path: Path) -> None:
    """A pull may take minutes, and a Spot VM has half a minute."""
    with world(tmp_path, training()) as vm:
        vm.program("docker", '[[ $1 != pull ]] || exec sleep 60; exec python3 "$WORLD/docker.py" "$@"')
        process = vm.start()
        with ended(process):
            wait_until(lambda: "pull" in vm.states)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: vm.is_gone)
        assert vm.end[0] == 75
        assert "before its container ran" in vm.end[1]
        assert vm.docker("run") == []


@pytest.mark.parametrize(
    ("refuses", "reason", "pulls"),
    [
        ({"pull": "x\ndenied: Permission downloadArtifacts denied"}, "can't be pulled: denied: Permission", 1),
        ({"pull": "dial tcp: i/o timeout"}, "can't be pulled: dial tcp: i/o timeout", 5),
        ({"run": 'could not select device driver "" with [[gpu]]'}, "can't be started: could not select", 1),
        ({"info": "Cannot connect to the Docker daemon"}, "docker doesn't run", 0),
    ],
    ids=["denied", "network", "no toolkit", "no engine"],
)
@in_own_network
def test_a_container_that_never_ran(tmp_path: Path, refuses: dict[str, str], reason: str, pulls: int) -> None:
    with world(tmp_path, training()) as vm:
        vm.write("docker/refuses", json.dumps(refuses))
        if "info" in refuses:
            vm.program("docker", "exit 1")
        vm.boot()
        assert vm.is_gone
        assert vm.end[0] == 70
        assert reason in vm.end[1]
        assert vm.states[-1] == "failed"
        assert vm.reason == vm.end[1]
        assert len(vm.docker("pull")) == pulls


@in_own_network
def test_a_driver_that_never_comes_ends_a_vm_that_trains(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        vm.write("no-driver", "")
        vm.boot()
        assert vm.is_gone
        assert "nvidia-smi gives no answer" in vm.end[1]


@in_own_network
def test_an_image_without_docker(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        vm.hide("docker")
        vm.boot()
        assert "boot a Deep Learning VM image" in vm.end[1]


@in_own_network
def test_a_vm_that_may_not_delete_itself_says_which_grant_is_missing_and_goes_off(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        vm.cloud.compute.deny("compute.instances.delete", vm.email)
        vm.write("docker/exit", "0")
        assert vm.boot() == 0
        assert not vm.is_gone
        assert vm.is_off
        assert vm.record
        assert vm.record["exit"] == 0
        assert vm.record["cleanup"].endswith(vm.told["grant"])
        assert "switched off" in vm.record["cleanup"]
        assert "gcloud projects add-iam-policy-binding" in vm.serial


@in_own_network
def test_a_grant_that_counts_for_its_name_alone_is_enough(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        vm.cloud.faults.add(Fault("compute.instances.delete", Status(403)))
        vm.write("docker/exit", "0")
        vm.boot()
        assert vm.is_gone
        deleted = [one.path.rpartition("/")[2] for one in vm.cloud.requests if one.method == "DELETE"]
        assert deleted == [vm.number, "job-1"]
        assert vm.record
        assert vm.record["cleanup"] == ""


@pytest.mark.parametrize("operation", ["compute.instances.delete", "storage.objects.insert"])
@in_own_network
def test_lost_answers_are_asked_for_again(tmp_path: Path, operation: str) -> None:
    with world(tmp_path, training()) as vm:
        vm.cloud.faults.add(Fault(operation, Reset(), times=2))
        vm.cloud.faults.add(Fault(operation, Status(503), times=2))
        vm.write("docker/exit", "1")
        vm.boot()
        assert vm.is_gone
        assert vm.end[0] == 1


@in_own_network
def test_a_lost_connection_switches_the_vm_off(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        vm.cloud.faults.add(Fault("*", Reset(), times=None))
        vm.write("docker/exit", "0")
        assert vm.boot() == 0
        assert vm.is_off
        assert not vm.record
        assert "the run folder doesn't take how this ended" in vm.serial


@in_own_network
def test_a_vm_whose_end_is_written_goes_without_another_start(tmp_path: Path) -> None:
    """It came up again after its end; or somebody has cancelled the run before it began."""
    with world(tmp_path, training()) as vm:
        name = f"runs/job-1/machines/{vm.number}.json"
        vm.cloud.objects.put("b-b", name, b'{"exit": 75, "cancelled": true}')
        vm.boot()
        assert vm.is_gone
        assert vm.record == {"exit": 75, "cancelled": True}
        assert vm.docker("run") == vm.docker("pull") == []


@in_own_network
def test_the_record_of_whoever_came_first_stays(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        process = vm.start()
        with ended(process):
            wait_until(lambda: "running" in vm.states)
            vm.cloud.objects.put("b-b", f"runs/job-1/machines/{vm.number}.json", b'{"exit": 75, "cancelled": true}')
            vm.write("docker/exit", "0")
            wait_until(lambda: vm.is_gone)
        assert vm.record == {"exit": 75, "cancelled": True}


@pytest.mark.parametrize(
    ("code", "starts"), [(None, 0), ("255", 1), ("137", 1), ("0", 0)], ids=["runs", "died", "killed", "done"]
)
@in_own_network
def test_a_second_boot_makes_no_second_container(tmp_path: Path, code: str | None, starts: int) -> None:
    """One that died with the machine runs on from what it has saved; one that had ended is at its end."""
    with world(tmp_path, training()) as vm:
        vm.write("docker/container", "")
        if code:
            vm.write("docker/exit", code)
        process = vm.start()
        with ended(process):
            if code != "0":
                wait_until(lambda: "running" in vm.states)
                vm.write("docker/exit", "0")
            wait_until(lambda: vm.is_gone)
        assert vm.docker("run") == []
        assert len(vm.docker("start")) == starts
        assert vm.end[0] == 0


@in_own_network
def test_the_script_started_twice_does_its_work_once(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        first = vm.start()
        with ended(first):
            wait_until(lambda: "running" in vm.states)
            second = vm.start()
            with ended(second):
                assert second.wait(120) != 0
            vm.write("docker/exit", "0")
            wait_until(lambda: vm.is_gone)
        assert len(vm.docker("run")) == 1


@in_own_network
def test_under_systemd_the_job_is_a_unit_of_its_own(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        (vm.folder / "run" / "systemd" / "system").mkdir(parents=True)
        vm.program(
            "systemd-run", 'printf "%s\\n" "$@" >"$WORLD/unit"; while [[ $1 == --* ]]; do shift; done; exec "$@"'
        )
        vm.write("docker/exit", "0")
        vm.boot()
        assert vm.is_gone
        unit = (vm.folder / "unit").read_text().splitlines()
        assert "--unit=launch-train" in unit
        assert "--property=KillMode=mixed" in unit
        assert "--property=After=network-online.target docker.service" in unit
        assert unit[-3:] == ["bash", "/run/launch/startup.sh", "train"]


@in_own_network
def test_docker_gets_the_token_by_the_helper_and_no_disk_has_it(tmp_path: Path) -> None:
    with world(tmp_path, training()) as vm:
        vm.program(
            "docker",
            '[[ $1 != pull ]] || { cat "$DOCKER_CONFIG/config.json"; printf us-docker.pkg.dev | '
            'docker-credential-launch get; } >"$WORLD/login"; exec python3 "$WORLD/docker.py" "$@"',
        )
        vm.write("docker/exit", "0")
        token = vm.server.token
        vm.boot()
        decoder = json.JSONDecoder()
        text = (vm.folder / "login").read_text()
        config, end = decoder.raw_decode(text)
        assert config == {"credHelpers": {"us-docker.pkg.dev": "launch"}}
        login, _ = decoder.raw_decode(text[end:].strip())
        assert login["Secret"] == token
        lying = [path for path in (vm.folder / "lib").rglob("*") if path.is_file()]
        assert lying
        assert not [path for path in lying if token in path.read_text()]


@in_own_network
def test_the_local_ssds_are_the_jobs_scratch(tmp_path: Path) -> None:
    """Two of them; the disk that they become is a tmpfs here."""
    with world(tmp_path, training(machine={"type": "l4", "gpus": 2, "local_ssds": 2})) as vm:
        for disk in ("google-local-nvme-ssd-0", "google-local-nvme-ssd-1", "google-persistent-disk-0"):
            vm.write(f"disks/{disk}", "")
        for name in ("mdadm", "mkfs.ext4"):
            vm.program(name, f'echo {name} "$@" >>"$WORLD/calls"')
        vm.program("blkid", "exit 2")
        vm.program(
            "mount", 'PATH=/usr/bin:/bin; [[ $1 != -o ]] && exec mount "$@"; exec mount -t tmpfs tmpfs "${@: -1}"'
        )
        vm.write("docker/exit", "0")
        vm.boot()
        assert (vm.folder / "calls").read_text().splitlines() == [
            "mdadm --create /dev/md0 --run --level=0 --raid-devices=2 "
            "/dev/disk/by-id/google-local-nvme-ssd-0 /dev/disk/by-id/google-local-nvme-ssd-1",
            "mkfs.ext4 -q -F -L launch-ssd /dev/md0",
        ]
        (words,) = vm.docker("run")
        assert "TMPDIR=/mnt/localssd" in words
        assert words[words.index("--volume") + 1] == "/mnt/localssd:/mnt/localssd"

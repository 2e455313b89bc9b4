"""What the startup script of a job with mounts mounts, binds into the container and unmounts.

gcsfuse, apt-get and mount are stand-ins that note how they were called, and mount an empty file system in place of the
real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import Fault, Status
from tests.plan.planning import request
from tests.plan.test_vm_metadata import items
from tests.startup.shell import SCRIPT
from tests.startup.world import ZONE, World, in_own_network, world

MOUNTS = SCRIPT.with_name("mounts.sh")
EMPTY = "exec /bin/mount -t tmpfs none "
"""Mounts an empty file system at the folder that follows."""
NOTED = 'echo "${0##*/} $*" >>"$WORLD/calls"\n'
STAND_INS = {
    "gcsfuse": f'{EMPTY}"${{@: -1}}"',
    "mount": f'[[ $1 == -t || $2 == noatime* ]] || exec /bin/mount "$@"\n{EMPTY}"${{@: -1}}"',
    "mount.nfs": "",
    "mount.lustre": "",
    "mkfs.ext4": "touch $WORLD/made",
    "blkid": "[[ -e $WORLD/made ]]",
    "umount": 'exec /bin/umount "$@"',
    "apt-get": f"""
umask >>"$WORLD/umasks"
[[ $* == *"install gcsfuse" ]] || exit 0
printf '#!/bin/bash\\n{EMPTY}"${{@: -1}}"\\n' >"$WORLD/bin/gcsfuse"
chmod 755 "$WORLD/bin/gcsfuse"
""",
}


def job(*mounts: dict[str, Any]) -> dict[str, Any]:
    """The request of a job with these mounts."""
    texts = {"startup": SCRIPT.read_text(), "mount_script": MOUNTS.read_text()}
    return request(
        "vm",
        world={"run_id": "job-1", **texts},
        machine={"type": "l4", "gpus": 2},
        provisioning=["spot"],
        output="gs://b-b/runs",
        zones=[ZONE],
        mounts=list(mounts),
    )


@contextmanager
def vm_with(folder: Path, *mounts: dict[str, Any], lacks: str = "") -> Iterator[World]:
    """A VM whose startup script is the one in its request, and whose job ends at once with exit code 0."""
    body = job(*mounts)
    with world(folder, body) as vm:
        vm.script = vm.folder / "startup.sh"
        vm.script.write_text(items(body)["startup-script"])
        for name, text in STAND_INS.items():
            if name != lacks:
                vm.program(name, NOTED + text)
        vm.write("docker/exit", "0")
        yield vm


def calls(vm: World, name: str) -> list[str]:
    """How a stand-in was called."""
    lines = (vm.folder / "calls").read_text().splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def volumes(vm: World) -> list[str]:
    """What the container sees of the VM."""
    (words,) = vm.docker("run")
    return [word for before, word in pairwise(words) if before == "--volume"]


def test_shellcheck_finds_nothing() -> None:
    checked = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", MOUNTS], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_only_a_job_with_mounts_has_their_part_of_the_script() -> None:
    assert "mount_all" in items(job({"bucket": "b-b"}))["startup-script"]
    assert items(job())["startup-script"] == SCRIPT.read_text()


@in_own_network
def test_a_bucket_is_mounted_for_the_container_and_unmounted_at_the_end(tmp_path: Path) -> None:
    with vm_with(tmp_path, {"bucket": "b-b"}, {"bucket": "b-b", "path": "/data", "read_only": True}) as vm:
        assert vm.boot() == 0, vm.serial
        assert vm.is_gone
        assert vm.end == (0, "")
        assert vm.states == ["booting", "driver", "pull", "mount", "running", "ended"]
        options = "--implicit-dirs --file-mode=666 --dir-mode=777 -o allow_other"
        assert calls(vm, "gcsfuse") == [f"{options},rw b-b /mnt/launch/0", f"{options},ro b-b /mnt/launch/1"]
        assert volumes(vm) == ["/mnt/launch/0:/gcs/b-b:rw", "/mnt/launch/1:/data:ro"]
        assert calls(vm, "umount") == ["/mnt/launch/0", "/mnt/launch/1"]
        assert calls(vm, "apt-get") == []


@in_own_network
def test_gcsfuse_is_installed_where_the_image_lacks_it(tmp_path: Path) -> None:
    with vm_with(tmp_path, {"bucket": "b-b"}, lacks="gcsfuse") as vm:
        key = 'while [[ $1 != --output ]]; do shift; done; echo key >"$2"'
        vm.program("curl", f'[[ $* != *packages.cloud.google.com* ]] || {{ {key}; exit; }}; exec /usr/bin/curl "$@"')
        assert vm.boot() == 0, vm.serial
        assert vm.end == (0, "")
        (listed,) = (vm.folder / "apt" / "sources.list.d").iterdir()
        assert "https://packages.cloud.google.com/apt gcsfuse-" in listed.read_text()
        (trusted,) = (vm.folder / "apt" / "keyrings").iterdir()
        assert trusted.read_text() == "key\n"
        assert {path.stat().st_mode & 0o777 for path in (listed, trusted)} == {0o644}  # apt reads them as another user
        assert set((vm.folder / "umasks").read_text().split()) == {"0022"}
        update, install = calls(vm, "apt-get")
        assert "update" in update
        assert "sourceparts=-" in update
        assert install.endswith("install gcsfuse")


@pytest.mark.parametrize(
    ("bucket", "denied", "reason"),
    [
        ("b-b", ("storage.objects.list",), "lacks storage.objects.list on this bucket: gcloud storage buckets add-iam"),
        ("no-such-bucket", (), "the bucket gs://no-such-bucket does not exist"),
    ],
)
@in_own_network
def test_a_bucket_that_the_account_cannot_read_ends_the_attempt(
    tmp_path: Path, bucket: str, denied: tuple[str, ...], reason: str
) -> None:
    with vm_with(tmp_path, {"bucket": bucket}) as vm:
        vm.cloud.objects.deny("b-b", *denied)
        vm.boot()
        vm.cloud.objects.deny("b-b")
        assert vm.is_gone
        assert vm.end[0] == 70
        assert f"gs://{bucket}" in vm.end[1]
        assert reason in vm.end[1]
        assert not calls(vm, "gcsfuse")
        assert not vm.docker("run")


@in_own_network
def test_a_mount_that_fails_ends_the_attempt_and_unmounts_the_others(tmp_path: Path) -> None:
    with vm_with(tmp_path, {"bucket": "b-b"}, {"bucket": "b-b", "path": "/data"}) as vm:
        refuses = '[[ ${@: -1} != */1 ]] || { echo "fuse: device not found"; exit 1; }\n'
        vm.program("gcsfuse", NOTED + refuses + STAND_INS["gcsfuse"])
        vm.boot()
        assert vm.end == (70, "b-b can't be mounted at /data: fuse: device not found")
        assert calls(vm, "umount") == ["/mnt/launch/0"]
        assert vm.docker("run") == []


@in_own_network
def test_a_share_is_mounted_by_the_kernel(tmp_path: Path) -> None:
    share = {"nfs": "10.0.0.2:/share/a", "path": "/mnt/nfs/data"}
    with vm_with(tmp_path, share, {**share, "path": "/old", "read_only": True}) as vm:
        vm.boot()
        assert vm.end == (0, "")
        mounted = [f"-t nfs -o retry=1,{mode} 10.0.0.2:/share/a /mnt/launch/{n}" for n, mode in enumerate(("rw", "ro"))]
        assert [line for line in calls(vm, "mount") if "-t nfs" in line] == mounted
        assert volumes(vm) == ["/mnt/launch/0:/mnt/nfs/data:rw", "/mnt/launch/1:/old:ro"]
        assert calls(vm, "umount") == ["/mnt/launch/0", "/mnt/launch/1"]
        assert not calls(vm, "apt-get")


LUSTRE = {"lustre": "10.0.0.3@tcp:/lfs", "path": "/mnt/lustre/data"}


@in_own_network
def test_a_lustre_file_system_is_mounted_by_its_client(tmp_path: Path) -> None:
    with vm_with(tmp_path, LUSTRE) as vm:
        vm.boot()
        assert vm.end == (0, "")
        assert [line for line in calls(vm, "mount") if "-t lustre" in line] == [
            "-t lustre -o noatime,rw 10.0.0.3@tcp:/lfs /mnt/launch/0"
        ]
        assert volumes(vm) == ["/mnt/launch/0:/mnt/lustre/data:rw"]
        assert calls(vm, "umount") == ["/mnt/launch/0"]


@in_own_network
def test_a_kernel_without_a_lustre_client_ends_the_attempt_with_its_name(tmp_path: Path) -> None:
    with vm_with(tmp_path, LUSTRE, lacks="mount.lustre") as vm:
        key = 'while [[ $1 != --output ]]; do shift; done; echo key >"$2"'
        vm.program("curl", f'[[ $* != *us-apt.pkg.dev* ]] || {{ {key}; exit; }}; exec /usr/bin/curl "$@"')
        refuses = '[[ $* != *install* ]] || { echo "E: Unable to locate package"; exit 100; }\n'
        vm.program("apt-get", NOTED + refuses)
        vm.hide("mount.lustre")
        vm.boot()
        assert vm.end[0] == 70
        assert "no Lustre client for the kernel" in vm.end[1]
        assert "E: Unable to locate package" in vm.end[1]
        assert any(
            line.endswith(f"lustre-client-modules-{os.uname().release} lustre-client-utils")
            for line in calls(vm, "apt-get")
        )
        (listed,) = (vm.folder / "apt" / "sources.list.d").iterdir()
        assert "https://us-apt.pkg.dev/projects/lustre-client-binaries lustre-client-" in listed.read_text()
        assert not vm.docker("run")


@in_own_network
def test_a_share_that_does_not_answer_ends_the_attempt(tmp_path: Path) -> None:
    with vm_with(tmp_path, {"nfs": "10.0.0.2:/share", "path": "/data"}, lacks="mount.nfs") as vm:
        vm.hide("mount.nfs")
        refuses = '[[ $* != *"-t nfs"* ]] || { echo "mount.nfs: Connection timed out" >&2; exit 32; }\n'
        vm.program("mount", refuses + STAND_INS["mount"])
        vm.boot()
        assert vm.end == (70, "10.0.0.2:/share can't be mounted at /data: mount.nfs: Connection timed out")
        assert calls(vm, "apt-get")[0].endswith("install nfs-common")
        assert not vm.docker("run")


DISK = {"disk": "zones/us-central1-a/disks/corpus", "path": "/data"}
NEW = {"new_disk_gb": 500, "path": "/scratch"}


@in_own_network
def test_only_a_new_disk_is_formatted(tmp_path: Path) -> None:
    with vm_with(tmp_path, {**DISK, "read_only": True}, NEW) as vm:
        for number in range(2):
            (vm.folder / "disks" / f"google-launch-mount-{number}").touch()
        vm.boot()
        assert vm.end == (0, "")
        devices = [f"/dev/disk/by-id/google-launch-mount-{number}" for number in range(2)]
        assert calls(vm, "mkfs.ext4") == [f"-q -F -m 0 {devices[1]}"]
        mounted = [line for line in calls(vm, "mount") if "google-launch-mount" in line]
        assert mounted == [
            f"-o noatime,ro {devices[0]} /mnt/launch/0",
            f"-o noatime,rw {devices[1]} /mnt/launch/1",
        ]
        assert volumes(vm) == ["/mnt/launch/0:/data:ro", "/mnt/launch/1:/scratch:rw"]
        assert calls(vm, "umount") == ["/mnt/launch/0", "/mnt/launch/1"]


@in_own_network
def test_a_disk_with_a_partition_is_mounted_by_it_and_a_disk_that_is_not_there_is_named(tmp_path: Path) -> None:
    with vm_with(tmp_path, DISK, {**DISK, "disk": DISK["disk"] + "-2", "path": "/b"}) as vm:
        for name in ("google-launch-mount-0", "google-launch-mount-0-part1"):
            (vm.folder / "disks" / name).touch()
        vm.boot()
        assert [line.split()[2] for line in calls(vm, "mount") if "launch-mount" in line] == [
            "/dev/disk/by-id/google-launch-mount-0-part1"
        ]
        assert vm.end[0] == 70
        assert vm.end[1].startswith("zones/us-central1-a/disks/corpus-2 can't be mounted at /b: ")
        assert not calls(vm, "mkfs.ext4")


@in_own_network
def test_cloud_storage_is_asked_again(tmp_path: Path) -> None:
    with vm_with(tmp_path, {"bucket": "b-b"}) as vm:
        vm.cloud.faults.add(Fault("storage.objects.list", Status(503), times=2))
        vm.boot()
        assert vm.end[0] == 0

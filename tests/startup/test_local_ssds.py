"""How the startup script makes one scratch disk of all local SSDs: what it calls, with stand-ins for the programs."""

from __future__ import annotations

from pathlib import Path

from tests.startup.shell import call


def disks(folder: Path, *names: str) -> Path:
    """A folder like /dev/disk/by-id."""
    folder.mkdir(exist_ok=True)
    for name in ("google-persistent-disk-0", *names):
        (folder / name).touch()
    return folder


SSD = "google-local-nvme-ssd-"
PROGRAMS = """
for one in mdadm mkfs.ext4 mount chmod; do eval "$one() { echo $one \\"\\$@\\"; }"; done
mkdir() { command mkdir "$@"; }; mountpoint() { return 1; }; blkid() { return 1; }
"""


def prepared(tmp_path: Path, *names: str, more: str = "") -> list[str]:
    """What is called to make the local SSDs one disk."""
    folder = disks(tmp_path / "disks", *names)
    ran = call(tmp_path, f"DISKS={folder} SCRATCH={tmp_path}/mnt; {PROGRAMS}{more}\nlocal_ssds")
    assert ran.returncode == 0, ran.stderr
    return [line.replace(str(folder), "DISKS").replace(str(tmp_path), "") for line in ran.stdout.splitlines()]


def test_a_vm_without_local_ssds_has_nothing_to_prepare(tmp_path: Path) -> None:
    assert prepared(tmp_path) == []


def test_one_local_ssd_is_formatted_and_mounted(tmp_path: Path) -> None:
    assert prepared(tmp_path, f"{SSD}0", f"{SSD}0-part1") == [
        f"mkfs.ext4 -q -F -L launch-ssd DISKS/{SSD}0",
        f"mount -o discard,noatime DISKS/{SSD}0 /mnt",
        "chmod 1777 /mnt",
    ]


def test_several_are_striped(tmp_path: Path) -> None:
    names = [f"{SSD}{n}" for n in (0, 2, 10)]
    listed = " ".join(f"DISKS/{name}" for name in names)
    assert prepared(tmp_path, *names) == [
        f"mdadm --create /dev/md0 --run --level=0 --raid-devices=3 {listed}",
        "mkfs.ext4 -q -F -L launch-ssd /dev/md0",
        "mount -o discard,noatime /dev/md0 /mnt",
        "chmod 1777 /mnt",
    ]


def test_what_an_earlier_boot_has_made_is_kept(tmp_path: Path) -> None:
    """After a reboot the kernel has put the stripes together under a name of its own."""
    found = prepared(tmp_path, f"{SSD}0", f"{SSD}1", more="blkid() { echo /dev/md127; }")
    assert found == ["mount -o discard,noatime /dev/md127 /mnt", "chmod 1777 /mnt"]
    assert prepared(tmp_path, f"{SSD}0", more="mountpoint() { return 0; }") == []

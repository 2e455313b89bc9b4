"""`launch vm` for a VM to work on: what is looked at before it costs anything, and what is told if it can't be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.testing.googlecloud import Fault, Status
from tests.cli.vms import Vms

MAKE = ("--gpus", "2", "--type", "l4", "--name", "dev", "--zone", "us-central1-a", "--hours", "12")


@pytest.fixture
def tools(vms: Vms, tmp_path: Path) -> Path:
    """All the programs that are here: SSH's, and gcloud."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ssh", "ssh-keygen", "gcloud"):
        (folder / name).write_text("#!/bin/sh\necho ssh: connect to host x port 22: Connection refused >&2\nexit 255\n")
        (folder / name).chmod(0o755)
    vms.env |= {"PATH": str(folder), "HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}
    return folder


@pytest.mark.parametrize("missing", ["ssh", "ssh-keygen", "gcloud"])
def test_an_unreachable_vm_is_not_created(vms: Vms, tools: Path, missing: str) -> None:
    (tools / missing).unlink()
    assert f"{missing}" in vms.launch(*MAKE, code=1).err
    assert not vms.asked("POST")


def test_without_a_known_user_no_vm_is_created(vms: Vms, tools: Path) -> None:
    vms.env["CLOUDSDK_CORE_ACCOUNT"] = ""
    ran = vms.launch(*MAKE, code=2)
    assert "gcloud has none" in ran.err
    assert "launch ssh NAME --user USER" in ran.err
    assert not vms.asked("POST")
    vms.launch(*MAKE, "--detach")
    assert vms.status("dev") == "RUNNING"


def test_an_unusable_vm_is_reported_as_billed(vms: Vms, tools: Path) -> None:
    (tools.parent / ".ssh").mkdir()
    for name in ("google_compute_engine", "google_compute_engine.pub"):
        (tools.parent / ".ssh" / name).write_text("ssh-rsa AAAA me\n")
    vms.cloud.faults.add(Fault("oslogin.*", Status(403), times=None))
    ran = vms.launch(*MAKE, "--no-preflight", code=4)
    assert vms.status("dev") == "RUNNING"
    assert ran.err.endswith("The VM exists and is billed: launch vm status dev, launch vm delete dev\n")


def test_an_existing_vm_is_not_changed(vms: Vms) -> None:
    vms.launch(*MAKE, "--detach", "--no-preflight")
    ran = vms.launch(*MAKE, "--detach", "--no-preflight", "--lease", "2h")
    assert "dev already exists; its zone" in ran.err
    assert len([path for path in vms.asked("POST") if path.endswith("/instances")]) == 1


def test_a_stopped_vm_is_not_started(vms: Vms) -> None:
    vms.launch(*MAKE, "--detach", "--no-preflight")
    vms.launch("stop", "dev")
    ran = vms.launch(*MAKE, "--detach", "--no-preflight", code=2)
    assert "VM dev already exists and is stopped" in ran.err
    assert "unknown" not in ran.err
    assert "launch vm start dev" in ran.err


def test_the_preflight_output_fits_the_screen(vms: Vms) -> None:
    ran = vms.launch(*MAKE, "--detach")
    told = [line for line in ran.err.splitlines() if "gcloud" not in line and "https:" not in line]
    assert "Private Google Access" in " ".join(" ".join(told).split())
    assert max(map(len, told)) <= 80


def test_sigterm_reports_what_keeps_running(vms: Vms, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = "head -c 200000 /dev/zero"  # more than a pipe holds: launch is past starting the process, and reads
    (tools / "ssh-keygen").write_text(f"#!/bin/sh\n{read}\nkill -TERM {os.getpid()}\nsleep 5\n")
    ran = vms.launch(*MAKE, "--no-preflight", code=143)
    assert "the VM keeps running" in ran.err
    assert "launch vm delete dev deletes it" in ran.err


def test_a_dry_run_shows_the_end_of_the_lease(vms: Vms) -> None:
    ran = vms.launch(*MAKE, "--lease", "4h", "--idle-stop", "90m", "--dry-run")
    assert "limits    12 h of billed time, stops itself after 4 h or when idle for 90 min\n" in ran.out


def test_an_invalid_image_family_is_refused(vms: Vms) -> None:
    ran = vms.launch(*MAKE, "--image", "docker.io/me/mine@sha256:00", "--dry-run", code=2)
    assert "projects/P/global/images/I" in ran.err

"""Our own key, and those of VMs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.apply import sshkeys
from launcher.errors import LaunchError, UsageError
from tests.ssh.server import make_key

ED, RSA = "AAAAC3NzaC1lZDI1NTE5AAAAIIGk", "AAAAB3NzaC1yc2EAAAADAQABAAABgQ=="


def test_a_key_is_made_once_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / ".ssh"
    key = sshkeys.own_key(folder, told.append)
    assert key == folder / "google_compute_engine"
    assert str(key) in told[0]
    assert key.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    public = sshkeys.public_key(key)
    assert public.startswith("ssh-rsa ")
    assert sshkeys.own_key(folder, told.append) == key
    assert len(told) == 1
    assert sshkeys.public_key(key) == public


def test_a_public_half_that_is_lost_is_made_anew(tmp_path: Path) -> None:
    key = make_key(tmp_path / sshkeys.KEY)
    words = sshkeys.public_key(key).split()[:2]
    key.with_name(f"{key.name}.pub").unlink()
    sshkeys.own_key(tmp_path, pytest.fail)
    assert sshkeys.public_key(key).split()[:2] == words


def test_a_public_half_that_cant_be_written(tmp_path: Path) -> None:
    key = sshkeys.own_key(tmp_path, lambda _text: None)
    public = key.with_name(f"{key.name}.pub")
    public.unlink()
    public.mkdir()
    with pytest.raises(LaunchError, match=r"google_compute_engine\.pub can't be written"):
        sshkeys.own_key(tmp_path, lambda _text: None)


def test_what_is_no_key(tmp_path: Path) -> None:
    (tmp_path / sshkeys.KEY).write_text("nothing")
    with pytest.raises(LaunchError, match="no SSH key could be made"):
        sshkeys.own_key(tmp_path, pytest.fail)


def test_no_openssh_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="ssh-keygen isn't here") as caught:
        sshkeys.own_key(tmp_path, lambda _: None)
    assert "openssh-client" in caught.value.hint


@pytest.mark.parametrize(
    ("told", "keys"),
    [
        ({}, ()),
        ({"ssh-rsa": RSA, "ssh-ed25519": ED}, (f"ssh-ed25519 {ED}", f"ssh-rsa {RSA}")),
        ({"ssh-ed25519": f"{ED}\n* ssh-rsa AAAA"}, (f"ssh-ed25519 {ED}",)),
        ({"ssh-ed25519": f"\n*.example.com {ED}"}, ()),
        ({"ssh-dss": ED, "ssh-ed25519": "", "ssh-rsa": "no base64!"}, ()),
    ],
)
def test_host_keys_are_what_a_vm_may_say(told: dict[str, str], keys: tuple[str, ...]) -> None:
    assert sshkeys.host_keys(told) == keys


def test_known_hosts_keep_what_is_others(tmp_path: Path) -> None:
    file = tmp_path / "launch" / "known_hosts"
    assert not sshkeys.know(file, "compute.1", ())
    assert not file.exists()
    assert sshkeys.know(file, "compute.1", (f"ssh-rsa {RSA}",))
    assert sshkeys.know(file, "compute.12", (f"ssh-rsa {RSA}",))
    assert sshkeys.know(file, "compute.1", (f"ssh-ed25519 {ED}",))
    assert file.read_text() == f"compute.12 ssh-rsa {RSA}\ncompute.1 ssh-ed25519 {ED}\n"
    found = subprocess.run(["ssh-keygen", "-F", "compute.12", "-f", file], capture_output=True, text=True, check=True)
    assert RSA in found.stdout
    before = file.stat().st_ino
    assert sshkeys.know(file, "compute.1", (f"ssh-ed25519 {ED}",))
    assert file.stat().st_ino == before, "what is there already isn't written again"


def test_a_folder_that_cant_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="can't be made"):
        sshkeys.know(tmp_path / "file" / "launch" / "known_hosts", "compute.1", ("ssh-rsa AAAA",))


def test_where_settings_are(tmp_path: Path) -> None:
    assert sshkeys.settings_folder({"HOME": "/home/me"}) == Path("/home/me/.config/launch")
    assert sshkeys.settings_folder({"HOME": "/home/me", "XDG_CONFIG_HOME": "/x"}) == Path("/x/launch")
    assert sshkeys.settings_folder({"HOME": "/home/me", "XDG_CONFIG_HOME": "rel"}) == Path("/home/me/.config/launch")


def test_nobody_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UsageError, match="no home folder"):
        sshkeys.home({})

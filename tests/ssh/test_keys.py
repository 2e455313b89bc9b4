"""Our own key, and those of VMs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import LaunchError, UsageError
from launcher.ssh import config_file, keys
from tests.ssh.server import make_key

ED, RSA = "AAAAC3NzaC1lZDI1NTE5AAAAIIGk", "AAAAB3NzaC1yc2EAAAADAQABAAABgQ=="


def test_a_key_is_made_once_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / ".ssh"
    key = keys.ensure_key(folder, told.append)
    assert key == folder / "google_compute_engine"
    assert str(key) in told[0]
    assert key.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    public = keys.public_key(key)
    assert public.startswith("ssh-rsa ")
    assert keys.ensure_key(folder, told.append) == key
    assert len(told) == 1
    assert keys.public_key(key) == public


def test_a_lost_public_key_is_recreated(tmp_path: Path) -> None:
    key = make_key(tmp_path / keys.KEY)
    words = keys.public_key(key).split()[:2]
    key.with_name(f"{key.name}.pub").unlink()
    keys.ensure_key(tmp_path, pytest.fail)
    assert keys.public_key(key).split()[:2] == words


@pytest.mark.slow
def test_a_public_half_that_cant_be_written(tmp_path: Path) -> None:
    key = keys.ensure_key(tmp_path, lambda _text: None)
    public = key.with_name(f"{key.name}.pub")
    public.unlink()
    public.mkdir()
    with pytest.raises(LaunchError, match=r"can't write .*google_compute_engine\.pub"):
        keys.ensure_key(tmp_path, lambda _text: None)


def test_invalid_keys(tmp_path: Path) -> None:
    (tmp_path / keys.KEY).write_text("nothing")
    with pytest.raises(LaunchError, match="could not create an SSH key"):
        keys.ensure_key(tmp_path, pytest.fail)


def test_no_openssh_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="ssh-keygen is not installed") as caught:
        keys.ensure_key(tmp_path, lambda _: None)
    assert "openssh-client" in caught.value.hint


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ({}, ()),
        ({"ssh-rsa": RSA, "ssh-ed25519": ED}, (f"ssh-ed25519 {ED}", f"ssh-rsa {RSA}")),
        ({"ssh-ed25519": f"{ED}\n* ssh-rsa AAAA"}, (f"ssh-ed25519 {ED}",)),
        ({"ssh-ed25519": f"\n*.example.com {ED}"}, ()),
        ({"ssh-dss": ED, "ssh-ed25519": "", "ssh-rsa": "no base64!"}, ()),
    ],
)
def test_host_keys_are_what_a_vm_may_say(told: dict[str, str], known: tuple[str, ...]) -> None:
    assert keys.host_keys(told) == known


def test_each_vm_has_its_own_known_hosts(tmp_path: Path) -> None:
    settings = tmp_path / "launch"
    file = keys.known_hosts(settings, "compute.1")
    assert not keys.store_host_keys(settings, "compute.1", ())
    assert not file.exists()
    assert keys.store_host_keys(settings, "compute.1", (f"ssh-rsa {RSA}",))
    assert keys.store_host_keys(settings, "compute.12", (f"ssh-rsa {RSA}",))
    assert keys.store_host_keys(settings, "compute.1", (f"ssh-ed25519 {ED}",))
    assert file.read_text() == f"compute.1 ssh-ed25519 {ED}\n"
    assert keys.known_hosts(settings, "compute.12").read_text() == f"compute.12 ssh-rsa {RSA}\n"
    found = subprocess.run(["ssh-keygen", "-F", "compute.1", "-f", file], capture_output=True, text=True, check=True)
    assert ED in found.stdout
    before = file.stat().st_ino
    assert keys.store_host_keys(settings, "compute.1", (f"ssh-ed25519 {ED}",))
    assert not keys.store_host_keys(settings, "compute.1", ())
    assert file.stat().st_ino == before, "what is there already isn't written again"
    assert file.stat().st_mode & 0o777 == 0o600
    keys.forget(settings, "compute.1")
    keys.forget(settings, "compute.1")
    assert [one.name for one in file.parent.iterdir()] == ["compute.12"]


KNOW = """
import sys
from pathlib import Path
from launcher.ssh import config_file
from launcher.ssh import keys
from tests.ssh.test_config_file import nobody, target
from tests.ssh.vms import machine

settings = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[2]), 40, 8):
    vm = machine(id=str(number), name=f"vm-{number}")
    keys.store_host_keys(settings, f"compute.{number}", (f"ssh-rsa {number}",))
    config_file.put(settings / "ssh_config", vm, target(vm), nobody)
keys.ensure_key(settings / ".ssh", print)
"""


@pytest.mark.slow
def test_40_vms_that_8_processes_register_at_once(tmp_path: Path) -> None:
    """None is lost, neither of the host keys nor of ssh's settings; and the user's key is made once."""
    command = [sys.executable, "-c", KNOW, str(tmp_path)]
    root = Path(__file__).parents[2]
    all_of_them = [
        subprocess.Popen([*command, str(number)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(8)
    ]
    for process in all_of_them:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in all_of_them:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0] for process in all_of_them]
    assert [process.returncode for process in all_of_them] == [0] * 8
    known = {file.name: file.read_text() for file in (tmp_path / "known_hosts.d").iterdir()}
    assert known == {f"compute.{n}": f"compute.{n} ssh-rsa {n}\n" for n in range(40)}
    assert set(config_file.host_blocks((tmp_path / "ssh_config").read_text())) == {f"vm-{n}" for n in range(40)}
    assert len("".join(said).splitlines()) == 1
    assert keys.public_key(tmp_path / ".ssh" / keys.KEY)


def test_where_settings_are(tmp_path: Path) -> None:
    assert keys.settings_folder({"HOME": "/home/me"}) == Path("/home/me/.config/launch")
    assert keys.settings_folder({"HOME": "/home/me", "XDG_CONFIG_HOME": "/x"}) == Path("/x/launch")
    assert keys.settings_folder({"HOME": "/home/me", "XDG_CONFIG_HOME": "rel"}) == Path("/home/me/.config/launch")


def test_a_missing_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UsageError, match="no home folder"):
        keys.home({})

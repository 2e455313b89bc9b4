"""The managed settings file, and the one line in the user's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.jobs.vm import VmInstance
from launcher.ssh import config_file
from launcher.ssh.command import SshTarget
from tests.ssh.vms import machine


def nobody(_resource: str) -> bool:
    return False


def target(one: VmInstance) -> SshTarget:
    return SshTarget(alias=f"compute.{one.id}", host="203.0.113.7", user="me", key=Path("/k"), known_hosts=Path("/h"))


def put(file: Path, *machines: VmInstance) -> str:
    for one in machines:
        config_file.put(file, one, target(one), nobody)
    return file.read_text()


def test_a_block_for_each_vm_and_the_newest_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "launch" / "ssh_config"
    text = put(file, machine(), machine(name="other", id="2"), machine(id="3"))
    assert list(config_file.host_blocks(text)) == ["dev", "other"]
    assert "HostKeyAlias compute.3" in config_file.host_blocks(text)["dev"]
    assert config_file.resource_of(config_file.host_blocks(text)["dev"]) == machine(id="3").resource
    assert file.stat().st_mode & 0o777 == 0o600
    assert put(file, machine(id="3")) == text, "the same again changes nothing"
    assert [one.name for one in file.parent.iterdir()] == ["ssh_config"]


def test_blocks_of_vms_that_are_gone(tmp_path: Path) -> None:
    file = tmp_path / "ssh_config"
    here, gone, silent = machine(), machine(name="gone", id="2"), machine(name="silent", id="3", zone="us-east4-a")
    foreign = machine(name="foreign", id="4", project="another")
    text = put(file, here, gone, silent, foreign)
    (file).write_text(text + "\nHost mine\n    HostName 192.0.2.1\n")
    config_file.put(file, here, target(here), config_file.gone([here], ["us-east4-a"], "my-project"))
    assert list(config_file.host_blocks(file.read_text())) == ["dev", "foreign", "mine", "silent"]


def test_the_include_line(tmp_path: Path) -> None:
    config, file = tmp_path / ".ssh" / "config", tmp_path / "with space" / "ssh_config"
    put(file, machine())
    assert not config_file.is_included(config, file, {})
    config_file.include(config, file)
    assert config_file.is_included(config, file, {})
    assert config.stat().st_mode & 0o777 == 0o600
    assert config.parent.stat().st_mode & 0o777 == 0o700
    ran = subprocess.run(["ssh", "-G", "-F", config, "dev"], capture_output=True, text=True, check=True)
    assert "hostname 203.0.113.7" in ran.stdout
    assert f"hostkeyalias compute.{machine().id}" in ran.stdout


def test_the_users_own_settings_stay(tmp_path: Path) -> None:
    """The line comes first: after a Host line it would be for that host alone. A link stays one."""
    kept, config, file = tmp_path / "dotfiles", tmp_path / "config", tmp_path / "ssh_config"
    kept.write_text("# mine \udcff\nHost build dev\n    User x\n", errors="surrogateescape")
    kept.chmod(0o640)
    config.symlink_to(kept)
    before = kept.read_bytes()
    put(file, machine())
    config_file.include(config, file)
    assert config.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o640
    assert kept.read_bytes() == f"Include {file}\n\n".encode() + before
    assert config_file.own_block(config, "dev")
    assert not config_file.own_block(config, "de")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Include ~/c/ssh_config\n", True),
        ("# a\n\ninclude ~/.ssh/x ~/c/ssh_config\n", True),
        ('Include "/home/me/c/ssh_config"\n', True),
        ("Include=/home/me/c/ssh_config\n", True),
        ("#Include ~/c/ssh_config\n", False),
        ("Host a\n  Include ~/c/ssh_config\n", False),
        ("Include ~/c/ssh_config2\n", False),
    ],
)
def test_the_include_line_is_recognised(tmp_path: Path, text: str, found: bool) -> None:
    config = tmp_path / "config"
    config.write_text(text)
    assert config_file.is_included(config, Path("/home/me/c/ssh_config"), {"HOME": "/home/me"}) is found

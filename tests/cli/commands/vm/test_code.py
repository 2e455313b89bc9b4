"""`launch vm code`: ssh learns a VM's name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.place import Place
from tests.cli.vms import Vms
from tests.ssh import SshServer


@pytest.fixture
def place(vms: Vms, tmp_path: Path) -> Iterator[Place]:
    with SshServer(tmp_path / "server") as server:
        yield Place(vms, server, tmp_path)


def test_ssh_knows_the_name(place: Place) -> None:
    ran = place.launch("vm", "code", "dev", "--yes", *place.there)
    assert "ssh dev" in ran.out
    assert "code --remote ssh-remote+dev" in ran.out
    assert "run launch vm code dev again" in ran.out
    config = place.home / ".ssh" / "config"
    assert config.read_text() == f'Include "{place.settings / "ssh_config"}"\n'
    argv = ["ssh", "-F", str(config), "dev", "echo hello"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.stdout == "hello\n", done.stderr
    before = config.stat().st_mtime_ns
    place.launch("vm", "code", "dev", "--yes", *place.there)
    assert config.stat().st_mtime_ns == before


def test_changing_the_users_ssh_config_needs_consent(place: Place) -> None:
    ran = place.launch("vm", "code", "dev", *place.there)
    assert "is unchanged; to use the name with ssh, add this line at its top" in ran.out
    assert not (place.home / ".ssh" / "config").exists()
    assert (place.settings / "ssh_config").exists()


def test_a_host_name_in_the_users_config_is_refused(place: Place) -> None:
    (place.home / ".ssh" / "config").write_text("Host dev\n  HostName 192.0.2.1\n")
    assert "also has its own Host dev" in place.launch("vm", "code", "dev", "--yes", *place.there).err


def test_a_deleted_vm_is_removed_from_the_config(place: Place) -> None:
    for kind, key in place.server.host_keys.items():
        place.vms.cloud.compute.set_guest("dev", f"hostkeys/{kind}", key)
    place.launch("vm", "code", "dev", *place.there)
    place.vms.compute.delete(place.machine)
    place.vms.clock.advance(60)
    place.vms.make("other")
    place.vms.cloud.compute.vm("other").body["networkInterfaces"][0]["accessConfigs"] = [{"natIP": "127.0.0.1"}]
    place.launch("vm", "code", "other", *place.there)
    text = (place.settings / "ssh_config").read_text()
    assert "Host other" in text
    assert "Host dev" not in text
    assert not known_hosts(place)


def known_hosts(place: Place) -> list[str]:
    return [file.name for file in (place.settings / "known_hosts.d").iterdir()]


def test_a_deleted_vms_host_keys_are_removed(place: Place) -> None:
    for kind, key in place.server.host_keys.items():
        place.vms.cloud.compute.set_guest("dev", f"hostkeys/{kind}", key)
    place.launch("vm", "code", "dev", *place.there)
    assert known_hosts(place) == [f"compute.{place.machine.id}"]
    place.launch("vm", "delete", "dev", "--yes")
    assert not known_hosts(place)

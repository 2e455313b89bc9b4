"""A folder on a host behaves as one on this machine, also when its connection is lost in the middle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common.storage import LocalFolder, OutputError, UnreachableError
from launcher.errors import LaunchError
from launcher.remote import connection, folder
from launcher.remote.connection import Connection, Host, connect_to
from tests.remote.hosts import NAME, a_host
from tests.ssh.server import SSHD, SshServer


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
        yield server


def test_a_host_folder_is_a_storage_like_one_here(host: SshServer) -> None:
    storage, here = folder.HostFolder(f"ssh://{NAME}/~/runs/a b"), LocalFolder(host.home / "runs" / "a b")
    assert storage.list() == []
    version = storage.write("attempts/0001.json", b"one", create=True)
    with pytest.raises(FileExistsError):
        storage.write("attempts/0001.json", b"two", create=True)
    with pytest.raises(FileExistsError):
        storage.swap("attempts/0001.json", b"two", "another version")
    assert (
        storage.swap("attempts/0001.json", b"\x00\xff\n" * 100_000, version)
        == here.read_version("attempts/0001.json")[1]
    )
    assert storage.read("attempts/0001.json") == b"\x00\xff\n" * 100_000
    assert storage.list("att") == ["attempts/0001.json"] == here.list()
    assert storage.written("attempts/0001.json") == here.written("attempts/0001.json")
    storage.delete("attempts/0001.json")
    with pytest.raises(FileNotFoundError):
        storage.read("attempts/0001.json")
    with pytest.raises(OutputError, match=r"link|name"):
        storage.read("../key")


def test_a_lost_connection_is_made_again_and_a_create_recognised(host: SshServer) -> None:
    storage = folder.HostFolder(f"ssh://{NAME}{host.home}/run")
    storage.write("a", b"1")
    server = storage._server
    assert server._process
    server._process.kill()  # as when the network goes away
    assert storage.read("a") == b"1"
    process = server._process
    assert process.stdout
    process.stdout.close()  # the request arrives, its answer does not
    assert storage.write("b", b"unique", create=True) == LocalFolder(host.home / "run").read_version("b")[1]
    with pytest.raises(FileExistsError):
        storage.write("b", b"other", create=True)


def test_a_host_that_does_not_answer_is_unreachable(host: SshServer) -> None:
    storage = folder.HostFolder(f"ssh://{NAME}/~/run")
    storage.write("a", b"1")
    host.__exit__(None, None, None)
    Connection(Host(NAME)).close()
    with pytest.raises(UnreachableError, match="Connection refused"):
        storage.read("a")


def test_a_banner_and_fish_do_not_disturb(host: SshServer) -> None:
    login = host.folder / "login"
    login.write_text(login.read_text().replace("export HOME", "echo Welcome; printf 'no newline'; export HOME"))
    assert connect_to(NAME).run("echo $((40 + 2)) '$x'") == b"42 $x\n"


def test_a_busy_server_that_closes_a_new_connection_is_tried_again(
    host: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    settings = tmp_path / "ssh_config"
    tunnel = tmp_path / "tunnel"  # ssh would put exec before a command of several
    tunnel.write_text(f"test -e {busy} && {{ rm {busy}; exit 1; }}; exec {SSHD} -i -f {host.folder}/sshd_config")
    settings.write_text(f"{settings.read_text()}  ProxyCommand sh {tunnel}\n")
    monkeypatch.setattr(connection, "BUSY_PAUSES", (0.0,))
    assert connect_to(NAME).run("echo 1") == b"1\n"
    Connection(Host(NAME)).close()
    busy.touch()
    monkeypatch.setattr(connection, "BUSY_PAUSES", ())
    with pytest.raises(LaunchError, match="Connection closed by"):
        connect_to(NAME).run("echo 1")


def test_an_interrupted_call_does_not_take_the_next_answer(host: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = folder.HostFolder(f"ssh://{NAME}/~/run")
    storage.write("a", b"1")
    storage.write("b", b"2")
    with monkeypatch.context() as patch:  # as Ctrl-C does, between the request and its answer
        patch.setattr(folder, "receive", lambda _reader: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            storage.read("a")
    assert storage.read("b") == b"2"

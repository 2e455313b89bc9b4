"""`launch ssh` against a Compute Engine and an OpenSSH server on loopback."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.testing.googlecloud import Fault, Status
from tests.cli.place import Place
from tests.cli.vms import Vms
from tests.ssh import Relay, SshServer
from tests.ssh.server import make_key


@pytest.fixture
def place(vms: Vms, tmp_path: Path) -> Iterator[Place]:
    with SshServer(tmp_path / "server") as server:
        yield Place(vms, server, tmp_path)


def test_a_command_and_its_exit_code(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.server.program("nvidia-smi", "echo GPU 0: NVIDIA L4; echo trouble >&2; exit 5")
    assert place.ssh("--", "nvidia-smi", "-L", code=5).shown == ""
    assert place.ssh("--", "printf '%s' \"$HOME\" | wc -c").shown == ""
    shown = capfd.readouterr()
    assert shown.out == f"GPU 0: NVIDIA L4\n{len(str(place.server.home))}\n"
    assert shown.err == "trouble\n"


@pytest.mark.slow
def test_without_a_command_a_shell_opens(place: Place) -> None:
    argv = [sys.executable, "-m", "launcher", "ssh", "dev", *place.there]
    ran = subprocess.run(
        argv,
        input="echo I am $(id -un); exit 4\n",
        env={**os.environ, **place.env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (4, f"I am {place.server.user}\n")


@pytest.mark.slow
def test_a_shell_at_a_terminal(place: Place) -> None:
    """It has one there too, and Ctrl-C is the shell's."""
    mine, its = os.openpty()
    argv = [sys.executable, "-m", "launcher", "ssh", "dev", *place.there]
    env = {**os.environ, **place.env, "TERM": "dumb"}
    with subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, env=env, start_new_session=True) as process:
        os.close(its)
        shown = typed(mine, b"sh -c 'tty; exec sleep 60'\n", until=b"/dev/pts/")  # one Ctrl-C ends both
        shown += typed(mine, b"\x03", until=b"^C")
        shown += typed(mine, b"echo un''broken; exit 6\n", until=b"unbroken")
        assert process.wait(30) == 6, shown
    os.close(mine)


def typed(terminal: int, text: bytes, *, until: bytes) -> bytes:
    """What a terminal shows after something was typed, up to what is waited for."""
    os.write(terminal, text)
    shown = b""
    while until not in shown:
        shown += os.read(terminal, 4096)
    return shown


def test_host_keys_come_from_google(place: Place) -> None:
    for kind, key in place.server.host_keys.items():
        place.vms.cloud.compute.set_guest("dev", f"hostkeys/{kind}", key)
    place.ssh("--", "true")
    known = place.settings / "known_hosts.d" / f"compute.{place.machine.id}"
    assert known.read_text().startswith(f"{known.name} ssh-ed25519 ")
    other = make_key(place.home / "other").with_name("other.pub").read_text().split()[1]
    place.vms.cloud.compute.set_guest("dev", "hostkeys/ssh-ed25519", other)
    assert "the host key of dev has changed" in place.ssh("--", "true", code=1).err


def test_a_recreated_vm_has_new_host_keys(place: Place) -> None:
    """Its name and address are the same, its host keys are not: its number tells."""
    place.ssh("--", "true")
    known = place.settings / "known_hosts.d" / f"compute.{place.machine.id}"
    text = known.read_text().replace(place.machine.id, "4999999999999999999").replace("AAAAC3", "AAAAC4")
    known.rename(known.with_name("compute.4999999999999999999")).write_text(text)
    place.ssh("--", "true")


def test_the_user_is_os_logins(place: Place) -> None:
    """Who has no name there yet gets one, with the key."""
    ran = place.launch("ssh", "dev", "--port", str(place.server.port), "--", "true", code=4)
    assert "dev refused the SSH key of me_example_com" in ran.err
    assert "--role=roles/compute.osAdminLogin" in ran.err
    assert "--member=user:me@example.com" in ran.err
    keys = place.vms.cloud.oslogin.keys["me@example.com"].values()
    assert [one["key"] for one in keys] == [place.key.with_name("google_compute_engine.pub").read_text().strip()]


def test_a_dry_run_changes_nothing(place: Place) -> None:
    place.key.unlink()
    before = len(place.vms.asked("POST"))
    line = place.launch("ssh", "dev", "--dry-run", "--port-forward", "8888", "--", "nvidia-smi", "-L").out
    argv = shlex.split(line)
    assert argv[0] == "ssh"
    assert argv[-2:] == [f"compute.{place.machine.id}", "nvidia-smi -L"]
    assert "HostName=127.0.0.1" in argv
    assert "127.0.0.1:8888:localhost:8888" in argv
    assert len(place.vms.asked("POST")) == before
    assert not place.key.exists()
    assert not place.settings.exists()


def test_a_stopped_vm(place: Place) -> None:
    place.vms.cloud.compute.power_off("dev")
    place.vms.clock.advance(60)
    assert place.ssh("--", "true", code=1).err == "error: dev is stopped\nlaunch vm start dev\n"


def test_an_unknown_vm_is_refused(place: Place) -> None:
    assert "Did you mean dev?" in place.launch("ssh", "dve", code=2).err


def test_a_vm_without_a_route_is_refused(place: Place, tmp_path: Path) -> None:
    place.address("")
    place.env["PATH"] = str(tmp_path / "empty")
    ran = place.ssh("--", "true", code=1)
    assert "gcloud is not installed" in ran.err
    assert "--external-ip" in ran.err


def test_a_port_in_use_is_refused_before_connecting(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = place.ssh("--port-forward", f"{port}:80", code=2)
    assert f"local port {port} is not available" in ran.err
    assert f"--port-forward {port + 1}:80" in ran.err


def test_forwarded_ports_are_printed(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    ran = place.ssh("--port-forward", "18889:8888", "--", "echo on")
    assert ran.err == "launch: http://127.0.0.1:18889 is port 8888 of dev\n"
    assert capfd.readouterr().out == "on\n"


def test_a_closed_ssh_port_is_reported(place: Place) -> None:
    server = place.server
    ran = place.launch("ssh", "dev", "--user", server.user, "--port", "1", "--", "true", code=1)
    assert "dev refuses SSH connections" in ran.err


def test_disabled_os_login_is_reported(place: Place) -> None:
    place.vms.cloud.faults.add(Fault("oslogin.users.getLoginProfile", Status(403, info="SERVICE_DISABLED"), times=None))
    ran = place.launch("ssh", "dev", "--", "true", code=1)
    assert "gcloud services enable oslogin.googleapis.com" in ran.err


@pytest.mark.gcloud
def test_through_the_tunnel(place: Place, gcloud: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place.address("")
    place.vms.cloud.let_in("a token")
    place.env.update(place.vms.cloud.environ())
    place.env["CLOUDSDK_AUTH_DISABLE_CREDENTIALS"] = ""
    with Relay(tmp_path) as relay:
        relay.backends["dev", place.server.port] = place.server.port
        place.env.update(LAUNCH_IAP_TUNNEL_URL=relay.url, CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE=str(relay.authority))
        place.ssh("--", "echo through", code=0)
        assert capfd.readouterr().out == "through\n"
        assert len(relay.asked) == 1

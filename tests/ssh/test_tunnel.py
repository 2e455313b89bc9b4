"""Google's tunnel (IAP): gcloud's own client as ssh's proxy, against a relay on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.ssh import command
from launcher.ssh.command import TUNNEL_URL, choose_route
from launcher.ssh.session import Remote
from launcher.testing.googlecloud import GoogleCloud
from tests.ssh import Relay, SshServer
from tests.ssh.relay import NO_BACKEND, NOT_AUTHORIZED, NOT_FOUND, Refusal
from tests.ssh.server import free_port
from tests.ssh.vms import machine, target_of

pytestmark = pytest.mark.gcloud


@pytest.fixture
def relay(tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    cloud.let_in("a token")  # gcloud's client can't do without one
    monkeypatch.setattr(command, "CONNECT_SECONDS", 300)  # gcloud takes seconds to start, and more on a busy machine
    with Relay(tmp_path) as running:
        for name, value in {**cloud.environ(), "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": str(running.authority)}.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with SshServer(tmp_path / "server") as running:
        yield running


def through(relay: Relay, server: SshServer, gcloud: str, folder: Path, port: int | None = None) -> Remote:
    host, proxy = choose_route(machine(), gcloud, {**os.environ, TUNNEL_URL: relay.url})
    target = target_of(server, folder, host=host, proxy=proxy, port=port or server.port)
    return Remote(machine(), target, "me@example.com")


def test_a_megabyte_each_way(relay: Relay, server: SshServer, gcloud: str, tmp_path: Path) -> None:
    relay.backends["dev", server.port] = server.port
    sent = os.urandom(500_000).hex().encode()
    answer = through(relay, server, gcloud, tmp_path).run(["cat; exit 3"], stdin=sent, seconds=300)
    assert (answer.code, answer.out, answer.err) == (3, sent.decode(), "")
    asked = {name: relay.asked[0][name] for name in ("project", "zone", "instance", "interface", "port")}
    place = {"project": "my-project", "zone": "us-central1-a", "interface": "nic0"}
    assert asked == {**place, "instance": "dev", "port": str(server.port)}


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (NO_BACKEND, "4003: failed to connect to backend"),
        (NOT_AUTHORIZED, "me@example.com may not open a tunnel (IAP) to dev"),
        (NOT_FOUND, "4047: Failed to lookup instance"),
    ],
)
def test_what_the_relay_refuses(
    relay: Relay, server: SshServer, gcloud: str, tmp_path: Path, refusal: Refusal, words: str
) -> None:
    relay.backends["dev", server.port] = server.port
    relay.refusal = refusal
    with pytest.raises(LaunchError) as caught:
        through(relay, server, gcloud, tmp_path).run_attached(["true"])
    assert words in caught.value.problem


def test_a_vm_whose_ssh_isnt_up(relay: Relay, server: SshServer, gcloud: str, tmp_path: Path) -> None:
    port = free_port()
    relay.backends["dev", port] = port
    fault = through(relay, server, gcloud, tmp_path, port).run(["true"]).fault
    assert fault
    assert fault.passing
    assert "4003" in fault.error.problem


def test_no_relay(
    relay: Relay, server: SshServer, gcloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, proxy = choose_route(machine(), gcloud, {**os.environ, TUNNEL_URL: f"wss://127.0.0.1:{free_port()}"})
    there = Remote(machine(), target_of(server, tmp_path, host=host, proxy=proxy), "")
    with pytest.raises(LaunchError, match=r"can't open a tunnel \(IAP\) to dev:\n.*Connection refused") as caught:
        there.run_attached(["true"])
    assert "tunnel.cloudproxy.app" in caught.value.hint


def test_gcloud_that_isnt_logged_in(server: SshServer, gcloud: str, tmp_path: Path) -> None:
    """In its own words, which come before anything is sent."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CLOUDSDK_")]:
            patch.delenv(name)
        patch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
        patch.setenv("CLOUDSDK_CORE_CHECK_GCE_METADATA", "false")
        host, proxy = choose_route(machine(), gcloud, {TUNNEL_URL: f"wss://127.0.0.1:{free_port()}"})
        there = Remote(machine(), target_of(server, tmp_path, host=host, proxy=proxy), "")
        with pytest.raises(LaunchError, match="gcloud, which opens the tunnel to dev, is not logged in"):
            there.run_attached(["true"])

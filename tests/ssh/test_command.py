"""SSH command lines and settings, as OpenSSH's own client understands them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.errors import LaunchError, UsageError
from launcher.ssh import command
from launcher.ssh.command import INSTALL, TUNNEL_URL, choose_route
from tests.ssh.vms import NUMBER, machine

ODD = ["plain", "with space", 'quote"d', "100%", "it's", "$(id)", "back\\slash", "ünï", "#hash", "a;b", "%h"]


def target(
    key: Path, known_hosts: Path | None = None, proxy: tuple[str, ...] = (), user: str = "me"
) -> command.SshTarget:
    return command.SshTarget(
        alias=f"compute.{NUMBER}",
        host="203.0.113.7",
        user=user,
        key=key,
        known_hosts=known_hosts or key.with_name("known_hosts"),
        proxy=proxy,
    )


def understood(*argv: str) -> dict[str, str]:
    """What ssh makes of its settings."""
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    return {name: value for name, _, value in (line.partition(" ") for line in ran.stdout.splitlines())}


@pytest.mark.parametrize("name", ODD)
def test_paths_arrive_whole(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    there = target(folder / "key")
    argv = command.command(there)
    assert argv[0] == "ssh"
    (tmp_path / "config").write_text(command.host_block(["dev"], there), encoding="utf-8")
    for found in (
        understood("ssh", "-G", "-F", "none", *argv[1:]),
        understood("ssh", "-G", "-F", str(tmp_path / "config"), "dev"),
    ):
        assert found["hostname"] == "203.0.113.7"
        assert found["userknownhostsfile"].replace("%%", "%") == str(folder / "known_hosts")
        assert found["identityfile"].replace("%%", "%") == str(folder / "key")
        assert found["hostkeyalias"] == f"compute.{NUMBER}"
        assert found["stricthostkeychecking"] == "accept-new"
        assert found["user"] == "me"


@pytest.mark.parametrize("name", ODD)
def test_a_proxy_is_run_with_its_words(tmp_path: Path, name: str) -> None:
    """ssh runs it for real: it writes down what it was called with."""
    told = tmp_path / "told"
    script = tmp_path / "proxy"
    script.write_text(f'#!/bin/sh\nfor one; do printf "%s\\n" "$one"; done >{told}\necho trouble >&2\n')
    script.chmod(0o755)
    there = target(tmp_path / "key", proxy=(str(script), "start", name, "%p"))
    log = tmp_path / f"log {name}"
    ran = subprocess.run(command.command(there, log=log)[:], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (255, b"")
    assert told.read_text().splitlines() == ["start", name, "22"]
    assert "trouble" in log.read_text()


def test_names_that_no_line_can_hold(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unprintable characters"):
        command.settings(target(tmp_path / "a\nProxyCommand touch b"))


@pytest.mark.parametrize("user", ["-oProxyCommand=touch x", "me\nx", "", "a b", "a@b", "$(id)"])
def test_invalid_user_names(tmp_path: Path, user: str) -> None:
    with pytest.raises(UsageError, match="invalid user name"):
        command.command(target(tmp_path / "key", user=user))


def test_ports_are_open_to_this_machine_alone(tmp_path: Path) -> None:
    argv = command.command(
        target(tmp_path / "key"), forwards=[command.forward("8888"), command.forward("9000:6006")], shell=False
    )
    assert argv[argv.index("-L") + 1] == "127.0.0.1:8888:localhost:8888"
    assert "127.0.0.1:9000:localhost:6006" in argv
    assert "-N" in argv
    assert "ExitOnForwardFailure=yes" in argv


@pytest.mark.parametrize("text", ["", "0", "65536", "a", "1:2:3", "8888:", ":1", "-1", "１"])
def test_invalid_ports(text: str) -> None:
    with pytest.raises(UsageError, match="invalid port"):
        command.forward(text)


def test_the_route_to_a_vm() -> None:
    assert choose_route(machine(external_ip="203.0.113.7"), None, {}) == ("203.0.113.7", ())
    there = choose_route(machine(), "/opt/gcloud", {})
    assert there.host == f"compute.{NUMBER}"
    assert there.proxy[:6] == ("/opt/gcloud", "compute", "start-iap-tunnel", "dev", "%p", "--listen-on-stdin")
    assert {"--project=my-project", "--zone=us-central1-a"} < set(there.proxy)
    assert choose_route(machine(external_ip="203.0.113.7"), "/opt/gcloud", {}, tunnel=True) == there
    own = choose_route(machine(), "/opt/gcloud", {TUNNEL_URL: "wss://relay.example"})
    assert "--iap-tunnel-url-override=wss://relay.example" in own.proxy


@pytest.mark.parametrize(
    ("status", "problem", "hint"),
    [
        ("TERMINATED", "dev is stopped", "launch vm start dev"),
        ("STOPPING", "dev is shutting down (STOPPING)", "Once it is stopped: launch vm start dev"),
        ("STAGING", "dev is STAGING: no SSH yet", "launch vm status dev"),
    ],
)
def test_a_stopped_vm_has_no_route(status: str, problem: str, hint: str) -> None:
    with pytest.raises(LaunchError) as caught:
        choose_route(machine(status=status, external_ip="203.0.113.7"), "gcloud", {})
    assert (caught.value.problem, caught.value.hint) == (problem, hint)


def test_without_gcloud_and_without_an_external_ip() -> None:
    with pytest.raises(LaunchError, match=r"gcloud is not installed.*no external IP") as caught:
        choose_route(machine(), None, {})
    assert caught.value.hint == INSTALL

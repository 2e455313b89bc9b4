"""`launch on HOST,HOST` against two hosts, each in a network namespace of its own: sshd on the loopback interface, and
commands that see only their namespace's network, which a cable joins to the other's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch_train.host.job import is_locked
from launcher.errors import LaunchError
from launcher.remote.connection import Connection, Host
from launcher.services.hosts.service import OnHost
from tests.plan.planning import planned
from tests.remote.hosts import host_request, hosts, launch, started
from tests.services.test_on_host import QUICK, jobs_on, losses, processes_of, wait_until
from tests.ssh.server import SshServer

pytestmark = pytest.mark.slow

FIRST, SECOND = "alpha", "beta"
BOTH = f"{FIRST},{SECOND}"


def ip(*words: str, namespace: str = "") -> None:
    subprocess.run(["ip", *(["-n", namespace] if namespace else []), *words], check=True, capture_output=True)


@pytest.fixture
def networks() -> Iterator[dict[str, str]]:
    """Two network namespaces that a cable joins: name of a host -> namespace."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = {name: f"{name}-{os.getpid()}" for name in (FIRST, SECOND)}
    for namespace in names.values():
        ip("netns", "add", namespace)
    try:
        first, second = names.values()
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for number, namespace in enumerate(names.values(), 1):
            ip("address", "add", f"10.99.0.{number}/24", "dev", "cable", namespace=namespace)
            for link in ("lo", "cable"):
                ip("link", "set", link, "up", namespace=namespace)
        yield names
    finally:
        for namespace in names.values():
            ip("netns", "delete", namespace)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, networks: dict[str, str]) -> Iterator[list[SshServer]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    within = {name: f"ip netns exec {namespace}" for name, namespace in networks.items()}
    with hosts(tmp_path, monkeypatch, within, python=sys.executable) as both:
        yield both


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job in the current folder; returns a folder that both hosts share."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    threads = "env: {OMP_NUM_THREADS: 1}\n"  # of a machine that is a host alone, and of one that runs both nodes
    (folder / "job.yaml").write_text(threads + QUICK.replace("steps: 60", "steps: 80\n    checkpoint: {minutes: 0.02}"))
    return tmp_path / "shared"


def states(server: SshServer) -> list[Any]:
    folders = (server.home / "launch" / "jobs").iterdir()
    return [
        json.loads((folder / "end.json").read_bytes()) if not is_locked(folder / "lock") else None for folder in folders
    ]


def test_a_job_on_two_hosts_survives_the_loss_of_one_with_the_losses_of_an_undisturbed_run(
    servers: list[SshServer], shared: Path, tmp_path: Path
) -> None:
    words = ["on", BOTH, "job.yaml", "--cpu", "--output", str(shared)]
    client = started(*words)
    wait_until(lambda: any(shared.glob("*/checkpoints/*")))
    for pid in processes_of(servers[1]):  # as if the second host lost its power
        os.kill(pid, signal.SIGKILL)
    _, errors = client.communicate(timeout=240)
    assert client.returncode == 0, errors
    assert f"{SECOND} restarted, or the job's supervisor was killed" in errors
    assert f"attempt   2: on {FIRST}, {SECOND}" in errors
    assert len(jobs_on(servers[0])) == len(jobs_on(servers[1])) == 2
    whole = launch("local", "job.yaml", "--nodes", "2", "--output", str(tmp_path / "undisturbed"))
    assert whole.returncode == 0, whole.stderr
    assert losses(next(shared.iterdir())) == losses(next((tmp_path / "undisturbed").iterdir()))


@pytest.mark.usefixtures("shared")
def test_cancelling_a_job_stops_it_on_all_hosts_also_with_one_home_folder(servers: list[SshServer]) -> None:
    shutil.rmtree(servers[1].home)
    servers[1].home.symlink_to(servers[0].home)
    ran = launch("on", BOTH, "job.yaml", "--cpu", "--detach")
    assert ran.returncode == 0, ran.stderr
    run = jobs_on(servers[0])[0]["run"]
    assert launch("runs", "--on", FIRST).stdout.count(run) == 1
    assert launch("cancel", run).returncode == 0
    assert len(states(servers[0])) == 2
    assert all(states(servers[0]))
    assert json.loads(launch("status", run, "-o", "json").stdout)["state"] == "CANCELLED"
    assert launch("rm", run, "--yes").returncode == 0
    assert not jobs_on(servers[0])


def test_hosts_without_a_common_folder_or_network_are_refused_before_anything_starts(
    servers: list[SshServer], shared: Path, networks: dict[str, str]
) -> None:
    alone = launch("on", BOTH, "job.yaml", "--cpu")
    assert f"{SECOND}: ~/launch/runs is not the folder that {FIRST} has under that name" in alone.stderr
    ip("link", "set", "cable", "down", namespace=networks[SECOND])
    cut = launch("on", BOTH, "job.yaml", "--cpu", "--output", str(shared))
    assert f"{SECOND}: {FIRST} is not reached from here (tried 10.99.0.1, port" in cut.stderr
    assert cut.returncode == alone.returncode != 0
    assert not jobs_on(servers[0])
    assert not jobs_on(servers[1])


def test_a_host_that_refuses_its_node_leaves_no_job_on_the_others(servers: list[SshServer]) -> None:
    peers = [{"host": SECOND, "python": sys.executable, "address": "10.99.0.2", "first": "10.99.0.1"}]
    body = host_request("import time; time.sleep(60)", host=FIRST, peers=peers, python="/nonexistent/python")
    pools = body["job"]["jobSpec"]["workerPoolSpecs"]
    pools.append({**pools[0], "replicaCount": 1})
    with pytest.raises(LaunchError, match=f"{FIRST}: the job's Python /nonexistent/python does not exist"):
        OnHost(Connection(Host(FIRST))).create(planned().attempts[0], body, "0123")
    assert not jobs_on(servers[0])
    assert not jobs_on(servers[1])
    assert not processes_of(servers[1])

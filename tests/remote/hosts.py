"""Hosts that ssh reaches by their names: OpenSSH's servers on the loopback interface, and settings that name them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launch_train.host.job import is_locked
from launcher.jobs.job import RUN_LABEL
from launcher.remote import connection, folder
from launcher.remote.agent import trainer_digest
from tests.ssh.server import SshServer, make_key

NAME = "box"


@contextmanager
def a_host(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, python: str = "", known: bool = True, sends_trainer: bool = False
) -> Iterator[SshServer]:
    """Start a host that `ssh box` reaches. `python`: the interpreter that its `python3` runs; `known`: its key is;
    `sends_trainer`: launch_train is not there yet."""
    with hosts(place, monkeypatch, {NAME: ""}, python=python, known=known, sends_trainer=sends_trainer) as servers:
        yield servers[0]


@contextmanager
def hosts(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: Mapping[str, str],
    *,
    python: str = "",
    known: bool = True,
    sends_trainer: bool = False,
) -> Iterator[list[SshServer]]:
    """Start hosts that ssh reaches by their names. `within`: name -> what runs each command there; others as a_host."""
    key, settings, known_hosts = make_key(place / "key"), place / "ssh_config", place / "known_hosts"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(SshServer(place / ("host" if name == NAME else name), within=command))
            for name, command in within.items()
        ]
        for name, server in zip(within, servers, strict=True):
            server.let_in(key.with_suffix(".pub"))
            kind, host_key = next(iter(server.host_keys.items()))
            with known_hosts.open("a") as file:
                file.write(f"{name} {kind} {host_key}\n" if known else "")
            with settings.open("a") as file:
                file.write(
                    f"Host {name}\n  HostName 127.0.0.1\n  Port {server.port}\n  User {server.user}\n"
                    f"  HostKeyAlias {name}\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
                    f"  UserKnownHostsFile {known_hosts}\n"
                )
            if python:
                server.program("python3", f'exec {python} "$@"')
            if not sends_trainer:
                (server.home / "launch" / "trainer" / trainer_digest()).mkdir(parents=True)
                package = Path(contract.__file__).parents[1]
                (server.home / "launch" / "trainer" / trainer_digest() / "launch_train").symlink_to(package)
        programs = place / "programs"
        programs.mkdir()
        ssh = programs / "ssh"  # ssh looks for its settings in the account's home folder, whatever HOME says
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {settings} "$@"\n')
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "c"))
        connection.sockets.cache_clear()
        connection.connect_to.cache_clear()
        yield servers
        for server in servers:
            stop_jobs(server)
        folder.open_host_folder.cache_clear()
        while folder.servers:
            folder.servers.pop().close()
        for name in within:
            connection.Connection(connection.Host(name)).close()
        connection.sockets.cache_clear()
        connection.connect_to.cache_clear()


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of launch to its end."""
    argv = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240)


def started(*words: str) -> subprocess.Popen[str]:
    """Start a command of launch."""
    argv = [sys.executable, "-m", "launcher", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def host_request(code: str, **more: Any) -> dict[str, Any]:
    """Return the request of a job that runs Python code, with a run folder on the host."""
    env = [{"name": "LAUNCH_RUN_FOLDER", "value": "~/launch/runs/tiny-0123abcd"}]
    pool = {"containerSpec": {"command": ["python", "-c", code], "env": env}, "machineSpec": {"acceleratorCount": 0}}
    spec = {"workerPoolSpecs": [pool], "scheduling": {"timeout": "3600s"}}
    job = {"displayName": "tiny-0123abcd", "jobSpec": spec}
    labels = {RUN_LABEL: "tiny-0123abcd"}
    return {"host": NAME, "labels": labels, "code": "", "python": sys.executable, "job": job, **more}


def stop_jobs(server: SshServer) -> None:
    """Cancel the jobs on a host, and wait until they end."""
    jobs = server.home / "launch" / "jobs"
    for folder_of_job in jobs.iterdir() if jobs.is_dir() else ():
        (folder_of_job / "cancel").touch()
        until = time.monotonic() + 60
        while is_locked(folder_of_job / "lock"):
            assert time.monotonic() < until
            time.sleep(0.05)

"""A host that ssh reaches under a name: OpenSSH's server on the loopback interface, and settings that name it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    with SshServer(place / "host") as server:
        key = make_key(place / "key")
        server.let_in(key.with_suffix(".pub"))
        known_hosts = place / "known_hosts"
        kind, host_key = next(iter(server.host_keys.items()))
        known_hosts.write_text(f"{NAME} {kind} {host_key}\n" if known else "")
        settings = place / "ssh_config"
        settings.write_text(
            f"Host {NAME}\n  HostName 127.0.0.1\n  Port {server.port}\n  User {server.user}\n  HostKeyAlias {NAME}\n"
            f"  IdentityFile {key}\n  IdentitiesOnly yes\n  UserKnownHostsFile {known_hosts}\n"
        )
        programs = place / "programs"
        programs.mkdir()
        ssh = programs / "ssh"  # ssh looks for its settings in the account's home folder, whatever HOME says
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {settings} "$@"\n')
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "c"))
        if python:
            server.program("python3", f'exec {python} "$@"')
        connection.sockets.cache_clear()
        connection.connect_to.cache_clear()
        if not sends_trainer:
            (server.home / "launch" / "trainer" / trainer_digest()).mkdir(parents=True)
            package = Path(contract.__file__).parents[1]
            (server.home / "launch" / "trainer" / trainer_digest() / "launch_train").symlink_to(package)
        yield server
        stop_jobs(server)
        folder.open_host_folder.cache_clear()
        while folder.servers:
            folder.servers.pop().close()
        connection.Connection(connection.Host(NAME)).close()
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

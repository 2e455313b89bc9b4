"""Secrets of a job on a host: sent with its start, and in nothing but the environment of its processes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.host.job import is_locked
from launcher.errors import LaunchError
from launcher.services.hosts.service import read_secrets_here
from launcher.testing.googlecloud import GoogleCloud
from tests.remote.hosts import NAME, a_host, launch
from tests.services.test_on_host import wait_until
from tests.ssh.server import SshServer

STORED, EXPORTED = "canary-stored-5b1f", "canary-exported-9c2e"
SPEC = """
name: tiny
run: {script: work.py, launcher: python}
secrets:
  STORED_TOKEN: projects/my-project/secrets/stored/versions/latest
  EXPORTED_TOKEN: projects/other/secrets/missing/versions/latest
machine: {type: l4, gpus: 1}
"""
WORK = """
import hashlib, os, time
both = os.environ["STORED_TOKEN"] + os.environ["EXPORTED_TOKEN"]
print(hashlib.sha256(both.encode()).hexdigest(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: GoogleCloud) -> Iterator[SshServer]:
    cloud.secrets.add("stored", STORED.encode())
    for name, value in {**cloud.environ(), "EXPORTED_TOKEN": EXPORTED, "XDG_STATE_HOME": f"{tmp_path}/state"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.yaml").write_text(SPEC)
    (folder / "work.py").write_text(WORK)
    monkeypatch.chdir(folder)
    with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
        yield server


def has_value(text: bytes) -> bool:
    return STORED.encode() in text or EXPORTED.encode() in text


def files_with_a_value(*folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if has_value(path.read_bytes())]


def processes_with_a_value(kind: str) -> list[bytes]:
    """Return the command lines of the processes, except the tests' own, that have a value in /proc/PID/KIND."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and has_value((process / kind).read_bytes()):
                commands.append((process / "cmdline").read_bytes())
        except OSError:
            continue
    return commands


def test_a_value_is_in_no_file_and_no_argument_while_the_job_runs_nor_after_it(host: SshServer, tmp_path: Path) -> None:
    planned_run = launch("on", NAME, "job.yaml", "--cpu", "--dry-run", "-o", "json")
    assert not has_value(planned_run.stdout.encode())
    detached = launch("on", NAME, "job.yaml", "--cpu", "--detach")
    assert detached.returncode == 0, detached.stderr
    [folder] = (host.home / "launch" / "jobs").iterdir()
    digest = hashlib.sha256((STORED + EXPORTED).encode()).hexdigest()
    wait_until(lambda: digest in (folder / "output.log").read_text())
    assert "sent by launch: EXPORTED_TOKEN, STORED_TOKEN" in (folder / "output.log").read_text()
    memory = Path("/dev/shm")
    assert files_with_a_value(tmp_path, memory) == []
    assert processes_with_a_value("cmdline") == []
    scripts = processes_with_a_value("environ")
    assert scripts
    assert all(b"work.py" in command for command in scripts)
    handles = [link for link in Path("/proc").glob("[0-9]*/fd/*") if is_secret_file(link)]
    assert handles == []  # the node has read it
    (folder / "cancel").touch()
    wait_until(lambda: not is_locked(folder / "lock"))
    assert files_with_a_value(tmp_path, memory) == []
    assert not has_value(json.dumps(launch("status", f"{NAME}:tiny", "-o", "json").stdout).encode())


def is_secret_file(link: Path) -> bool:
    """Return whether an open file of a process is a deleted one in memory that has a value."""
    try:
        return str(link.readlink()).startswith("/dev/shm/") and has_value(link.read_bytes())
    except OSError:
        return False


@pytest.mark.slow
def test_a_secret_that_cannot_be_read_is_an_error_before_anything_starts(
    host: SshServer, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"LAUNCH_SECRETS": json.dumps({"TOKEN": "projects/my-project/secrets/nosuch/versions/latest"})}
    with pytest.raises(LaunchError, match=r"secret TOKEN .* doesn't exist") as refused:
        read_secrets_here(env, {**cloud.environ()})
    assert refused.value.hint == "Or set it in this shell: export TOKEN=VALUE"
    monkeypatch.delenv("EXPORTED_TOKEN")
    ran = launch("on", NAME, "job.yaml", "--cpu")
    assert ran.returncode != 0
    assert "EXPORTED_TOKEN" in ran.stderr
    assert not list((host.home / "launch").glob("jobs/*"))
    monkeypatch.setenv("EXPORTED_TOKEN", EXPORTED)
    again = launch("on", NAME, "job.yaml", "--cpu", "--detach")
    assert again.returncode == 0, again.stderr


def test_the_url_of_a_webhook_is_read_here_too(cloud: GoogleCloud) -> None:
    cloud.secrets.add("hook", b"https://example.com/x")
    env = {"LAUNCH_NOTIFY": json.dumps({"webhook": "projects/my-project/secrets/hook/versions/latest"})}
    assert read_secrets_here(env, cloud.environ()) == {"notify.webhook": "https://example.com/x"}
    assert read_secrets_here({"LAUNCH_NOTIFY": json.dumps({"webhook": "https://example.com"})}, {}) == {}

"""A VM for the startup script: it really runs, as root, in a mount and a network namespace of its own. Its cloud, its
bucket and its metadata server are the loopback ones; stand-ins record what it does to the machine.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from launcher.testing.googlecloud import GoogleCloud, Pace
from tests.plan.planning import told
from tests.startup.metadata import MetadataServer
from tests.startup.shell import SCRIPT

P = ParamSpec("P")
T = TypeVar("T")
ZONE = "us-central1-a"
CLONE_NEWNET = 0x40000000
MOUNTS = """
set -e
mkdir -p /dev/disk/by-id  # the one place that may not be there
for place in run lib:var/lib mnt apt:etc/apt stat:proc/stat uptime:proc/uptime disks:dev/disk/by-id; do
  mount --bind "$WORLD/${place%%:*}" "/${place#*:}"
done
exec bash "$@"
"""
STAND_INS = {
    "docker": 'exec python3 "$WORLD/docker.py" "$@"',
    "nvidia-smi": '[[ ! -e $WORLD/no-driver ]] && cat "$WORLD/gpus"',
    "poweroff": 'echo poweroff >>"$WORLD/calls"',
    "ss": 'cat "$WORLD/ss"',
    # Hours pass when a test says so.
    "date": '[[ $* == +%s ]] || exec /bin/date "$@"; echo $(($(/bin/date +%s) + $(cat "$WORLD/later")))',
}
FILES = {
    "gpus": "0\n",
    "ss": "",
    "later": "0",
    "calls": "",
    "stat": "cpu  10 0 10 80 0 0 0 0 0 0\n",
    "uptime": "3.00 3.00\n",
}


def in_own_network(test: Callable[P, T]) -> Callable[P, T]:
    """Mark an end-to-end test, and run it in a thread whose network has nothing but its loopback; what it starts,
    servers and processes, is there too."""

    @functools.wraps(test)
    def ran(*args: P.args, **kwargs: P.kwargs) -> T:
        with ThreadPoolExecutor(1, initializer=leave_the_network) as pool:
            return pool.submit(test, *args, **kwargs).result()

    return pytest.mark.e2e(ran)


def leave_the_network() -> None:
    """This thread alone (unshare(2), CLONE_NEWNET). Raises OSError for anybody but root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace needs root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


class World:
    """One VM. `tell` is what stands in its metadata item `launch`."""

    def __init__(self, folder: Path, cloud: GoogleCloud, server: MetadataServer, body: dict[str, Any]) -> None:
        self.folder = folder
        self.cloud = cloud
        self.server = server
        self.told = told(body)
        self.script = SCRIPT
        self.name = str(body["name"])
        self.number = server.number
        self.email = cloud.compute.vm(self.number).email
        self._lay_out()
        self.environ = {
            **cloud.environ(),
            **server.environ(),
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "WORLD": str(folder),
            "LAUNCH_POLL_SECONDS": "0.02",
            "LAUNCH_LOOK_SECONDS": "0.02",
        }

    def _lay_out(self) -> None:
        for name in ("run", "lib", "mnt", "apt", "bin", "docker", "disks"):
            (self.folder / name).mkdir(parents=True)
        for name, text in FILES.items():
            self.write(name, text)
        self.write("docker/refuses", "{}")
        shutil.copy(Path(__file__).with_name("docker.py"), self.folder)
        for name, text in STAND_INS.items():
            self.program(name, text)
        (self.folder / "bin" / "python3").symlink_to(Path(sys.executable).resolve())  # whatever else PATH begins with

    def write(self, name: str, text: str) -> None:
        """A file of the world, all of it at once."""
        (self.folder / f"{name}.new").write_text(text)
        (self.folder / f"{name}.new").replace(self.folder / name)

    def program(self, name: str, text: str) -> None:
        """A stand-in for a program."""
        self.write(f"bin/{name}", f"#!/bin/bash\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Boot: the script as Compute Engine runs it."""
        command = ["unshare", "--mount", "bash", "-c", MOUNTS, "mounts", str(self.script), *words]
        with (self.folder / "serial").open("ab") as serial:
            return subprocess.Popen(command, env=self.environ, stdout=serial, stderr=serial, start_new_session=True)

    def boot(self) -> int:
        """Start it, and wait until it is over: the script has ended, or the VM is gone, as its systemd tells it."""
        process = self.start()
        with ended(process):
            wait_until(lambda: process.poll() is not None or self.is_gone)
            process.terminate()
            return process.wait(120)

    def hide(self, *names: str) -> None:
        """Programs that this VM doesn't have: its path is a folder with links to all others."""
        found: dict[str, Path] = {}
        for folder in map(Path, reversed(self.environ["PATH"].split(os.pathsep))):
            found |= {path.name: path for path in (folder.iterdir() if folder.is_dir() else ())}
        (self.folder / "path").mkdir()
        for name in found.keys() - set(names):
            (self.folder / "path" / name).symlink_to(found[name])
        self.environ["PATH"] = str(self.folder / "path")

    @property
    def is_gone(self) -> bool:
        """Whether the VM is deleted."""
        return self.name not in self.cloud.compute.names()

    @property
    def record(self) -> dict[str, Any] | None:
        """How it ended, as the bucket has it."""
        bucket, _, folder = str(self.told["run_folder"]).removeprefix("gs://").partition("/")
        name = f"{folder}/machines/{self.number}.json"
        found = [blob.data for blob in self.cloud.objects.listed(bucket) if blob.name == name]
        return json.loads(found[0]) if found else None

    @property
    def end(self) -> tuple[int, str]:
        """The exit code and the reason of its record."""
        assert self.record
        return self.record["exit"], self.record["reason"]

    @property
    def states(self) -> list[str]:
        """What it has said of itself, in order."""
        path = "/computeMetadata/v1/instance/guest-attributes/launch/state"
        return [one.body.decode() for one in self.server.requests if one.path == path]

    @property
    def reason(self) -> str:
        """The last reason that it has given."""
        path = "/computeMetadata/v1/instance/guest-attributes/launch/reason"
        found = [one.body.decode() for one in self.server.requests if one.path == path]
        return found[-1] if found else ""

    def docker(self, command: str) -> list[list[str]]:
        """What Docker was asked: the arguments of each such command."""
        calls = self.folder / "docker" / "calls"
        lines = map(json.loads, calls.read_text().splitlines() if calls.exists() else ())
        return [words for name, *words in lines if name == command]

    @property
    def is_off(self) -> bool:
        """Whether it has switched itself off."""
        return "poweroff" in (self.folder / "calls").read_text()

    @property
    def serial(self) -> str:
        """What the script has said."""
        return (self.folder / "serial").read_text(errors="replace")


@contextmanager
def world(folder: Path, body: dict[str, Any]) -> Iterator[World]:
    """A VM that is up, made by an insert of `body`."""
    with GoogleCloud(buckets=("b-b",)) as cloud:
        cloud.compute.pace = Pace(staging=0, running=0, delete=0, stop=0)
        for source in (disk["source"] for disk in body["disks"] if "source" in disk):
            cloud.compute.park.add_disk(ZONE, source.rpartition("/")[2])
        data = json.dumps(body).encode()
        url = f"{cloud.url}/compute/v1/projects/my-project/zones/{ZONE}/instances"
        with urllib.request.urlopen(urllib.request.Request(url, data, method="POST")):
            pass
        with MetadataServer(cloud, ZONE, str(body["name"])) as server:
            try:
                yield World(folder / "world", cloud, server, body)
            finally:
                end_all(folder / "world")


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Inside the script runs; behind it this process of it is over."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def end_all(folder: Path) -> None:
    """End what a world has started and left: its watchdog, a pull."""
    mark = f"WORLD={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is over by now
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def wait_until(happened: Callable[[], bool], seconds: float = 300) -> None:
    """Raises AssertionError when it hasn't by then."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)

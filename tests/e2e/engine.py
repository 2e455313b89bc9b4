"""A real Docker engine and a real registry of the tests' own, and what is made once and kept: a base image, PyTorch.

Both come from Debian's packages (docker.io, docker-registry), and so does the base (debootstrap): nothing is taken from
a public registry. They have their own folders, sockets and bridge, so an engine that runs here already is left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.images.docker_engine import Engine, EngineError
from tests.e2e.base import CACHE, DEBIAN, PYTHON, architecture, base_archive, program, search_path

PROGRAMS = {
    "dockerd": "docker.io",
    "docker-registry": "docker-registry",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
}
"""Program -> Debian's package."""

TORCH = "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

START_SECONDS = 60


class Running(NamedTuple):
    """An engine and a registry that run. Both names of the registry lead to the same."""

    engine: str
    """DOCKER_HOST."""
    registry: str
    """localhost:PORT."""
    base: str
    """An image in both, with Python and pip."""
    pinned: str
    """The same, by its digest."""
    platform: str
    """Of this machine, such as linux/amd64."""

    @property
    def environ(self) -> dict[str, str]:
        """All that a command needs to find the engine; nobody's passwords."""
        return {"DOCKER_HOST": self.engine, "PATH": os.environ["PATH"], "DOCKER_CONFIG": "/nonexistent"}


@pytest.fixture(scope="session")
def containers() -> Iterator[Running]:
    """The engine and the registry, with the base image in both. Without root or the programs the tests are skipped."""
    require()
    with running() as found:
        yield found


@contextlib.contextmanager
def running() -> Iterator[Running]:
    """Start the engine and the registry, and put the base image into both. Needs root and PROGRAMS."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="launch-"))  # short: it holds sockets, whose paths have a limit
        stack.callback(shutil.rmtree, folder)
        bridge = stack.enter_context(network())
        registry = stack.enter_context(registry_at(folder / "registry"))
        host = stack.enter_context(engine_at(folder / "engine", bridge))
        engine = Engine.connect({"DOCKER_HOST": host})
        stack.callback(engine.api.close)
        base = f"{registry}/base:{DEBIAN}"
        engine.api.import_image(src=str(base_archive()), repository=f"{registry}/base", tag=DEBIAN)
        pinned = f"{registry}/base@{engine.push(base)}"
        yield Running(host, registry, base, pinned, f"linux/{architecture()[0]}")


@pytest.fixture(scope="session")
def torch_wheel() -> Path:
    """PyTorch for CPUs, as a file: inside a container pip would look for it where PyPI has gigabytes of CUDA."""
    return wheel()


def require() -> None:
    """Skip where no engine can run; CI takes no skips, so there it is a failure."""
    missing = {package for program, package in PROGRAMS.items() if not shutil.which(program, path=search_path())}
    if missing:
        pytest.skip(f"a Docker engine and a registry of our own need: sudo apt-get install {' '.join(sorted(missing))}")
    if os.geteuid() != 0:
        pytest.skip("a Docker engine of our own needs root: sudo make e2e")


@contextlib.contextmanager
def network() -> Iterator[str]:
    """A bridge for the engine's containers: docker0 belongs to an engine that may run here already."""
    name, address = f"launch{os.getpid()}", f"10.213.{os.getpid() % 250 + 1}.1/24"
    ip("link", "add", name, "type", "bridge")
    try:
        ip("address", "add", address, "dev", name)
        ip("link", "set", name, "up")
        yield name
    finally:
        ip("link", "delete", name)


def ip(*arguments: str) -> None:
    """Configure the network."""
    subprocess.run([program("ip"), *arguments], check=True, timeout=60)


@contextlib.contextmanager
def engine_at(folder: Path, bridge: str) -> Iterator[str]:
    """A Docker engine that keeps everything below a folder; its DOCKER_HOST."""
    folder.mkdir()
    host = f"unix://{folder}/docker.sock"
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    options = [f"--{option}={folder / name}" for option, name in places.items()]
    command = [program("dockerd"), f"--host={host}", f"--bridge={bridge}", "--storage-driver=overlay2", *options]
    try:
        with daemon(command, folder / "log", lambda: answers(host)):
            yield host
    finally:
        for left in (folder / "exec" / "netns").glob("*"):  # an engine leaves this mount when a container had `host`
            subprocess.run(["umount", str(left)], check=True, timeout=60)


@contextlib.contextmanager
def registry_at(folder: Path) -> Iterator[str]:
    """A registry without any protection, on loopback."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
    )
    command = [program("docker-registry"), "serve", str(config)]
    with daemon(command, folder / "log", lambda: listens(port)):
        yield f"localhost:{port}"


@contextlib.contextmanager
def daemon(command: list[str], log: Path, ready: Callable[[], bool]) -> Iterator[None]:
    """A process that serves as long as it is wanted; ended by its id."""
    with log.open("wb") as output, started(command, output.fileno()) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} doesn't start:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(60)


def started(command: list[str], output: int) -> subprocess.Popen[bytes]:
    """The process, out of reach of a Ctrl-C: its containers must end first."""
    return subprocess.Popen(
        command, stdout=output, stderr=output, env={**os.environ, "PATH": search_path()}, start_new_session=True
    )


def listens(port: int) -> bool:
    """Whether something takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def answers(host: str) -> bool:
    """Whether an engine answers."""
    try:
        Engine.connect({"DOCKER_HOST": host}).api.close()
    except EngineError:
        return False
    return True


def wheel() -> Path:
    """The file of PyTorch for CPUs, kept between sessions."""
    folder = CACHE / "torch"
    found = list(folder.glob(f"torch-{TORCH}-*.whl"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
        where = ["--python-version", PYTHON, "--platform", f"manylinux_2_28_{architecture()[1]}", "--dest", str(folder)]
        subprocess.run([*pip, *where, "--extra-index-url", TORCH_INDEX, f"torch=={TORCH}"], check=True, timeout=600)
        found = list(folder.glob(f"torch-{TORCH}-*.whl"))
    (file,) = found
    return file


if __name__ == "__main__":  # what is kept, made while other tests run: it takes minutes, and mostly waits
    print(base_archive(), wheel())

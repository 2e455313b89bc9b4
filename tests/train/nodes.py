"""Real nodes on loopback: `python -m launch_train.node` as processes (several nodes: forks of one, node_forks), with a
CLUSTER_SPEC as Vertex would set it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.train.node_forks import ForkedNode, fork_node

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 600
"""Far more than anything takes on a machine that does much else."""
NOTHING: Mapping[str, str] = MappingProxyType({})

# The clocks are the only thing that a test may change of a node.
_WITH_TIMING = """
import json, os, sys
from launch_train.node.control_store import Timing
from launch_train.node.__main__ import main
code = main(sys.argv[2:], timing=Timing(**json.loads(sys.argv[1])))
sys.stdout.flush()
os._exit(code)
"""


@dataclass
class Node:
    """One running launch_train.node and the file that takes its output."""

    process: subprocess.Popen[bytes] | ForkedNode
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def errors(self) -> str:
        """Its stderr, where that is apart."""
        return self.log.with_suffix(".err").read_text()

    def wait(self) -> int:
        return self.process.wait(timeout=LIMIT_S)

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def await_text(self, text: str) -> None:
        until(lambda: text in self.text or self.process.poll() is not None, f"{text!r} in {self.log.name}")
        assert text in self.text, self.text


def until(condition: Callable[[], bool], what: str, limit: float = LIMIT_S) -> None:
    """Wait for other processes to do something; fails the test after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit} s for {what}"
        time.sleep(0.02)


@dataclass
class Machines:
    """Starts nodes in a folder, and ends whatever is left of them."""

    folder: Path
    stack: ExitStack
    port: int
    size: int = 1

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def script(self, text: str, name: str = "work.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def start(
        self,
        *argv: str,
        node: int = 0,
        env: Mapping[str, str] = NOTHING,
        timing: Mapping[str, float] | None = None,
        apart: bool = False,
    ) -> Node:
        """`launch_train.node ARGV` as node `node`; its output goes to a separate file, with `apart` stderr to
        another."""
        log = self.folder / f"node-{node}-{time.monotonic_ns()}.log"
        environ = {**self._environ(node), **env}
        if self.size > 1:
            errors = log.with_suffix(".err") if apart else log
            forked = fork_node(argv, timing or {}, environ, self.folder, log, errors)
            self.stack.callback(_end, forked)
            return Node(forked, log)
        command = [sys.executable, "-m", "launch_train.node", *argv]
        if timing is not None:
            command = [sys.executable, "-c", _WITH_TIMING, json.dumps(timing), *argv]
        with log.open("wb") as sink, log.with_suffix(".err").open("wb") as other:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdout=sink,
                stderr=other if apart else sink,
                start_new_session=True,
            )
        self.stack.callback(_end, process)
        return Node(process, log)

    def _environ(self, node: int) -> dict[str, str]:
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "LAUNCH_RUN_FOLDER": str(self.run_folder)}
        environ |= {"LAUNCH_RUN": "demo-1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        if self.size > 1:
            environ["CLUSTER_SPEC"] = cluster_spec(self.size, node, self.port)
        return environ

    def left_over(self) -> list[str]:
        """Command lines of processes whose working directory is this folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cwd").readlink() == self.folder and (line := (entry / "cmdline").read_bytes()):
                    found.append(line.replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


@contextmanager
def machines(folder: Path, size: int = 1) -> Iterator[Machines]:
    """`size` machines; at the end no process of theirs may be alive."""
    with ExitStack() as stack:
        yield Machines(folder, stack, free_port(), size)


def cluster_spec(size: int, node: int, port: int) -> str:
    """CLUSTER_SPEC of a job with a primary replica and `size` - 1 workers, as a rehearsal on this machine."""
    pools = {"workerpool0": [f"127.0.0.1:{port}"], "workerpool1": [f"127.0.0.1:{port + n}" for n in range(1, size)]}
    task = {"type": "workerpool1", "index": node - 1} if node else {"type": "workerpool0", "index": 0}
    return json.dumps({"cluster": pools, "environment": "local", "task": task | {"trial": "1"}, "job": "{}"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes] | ForkedNode) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=LIMIT_S)

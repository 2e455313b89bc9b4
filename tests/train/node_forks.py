"""Nodes by fork of a process that has torch, which each of several nodes would import for its store: 2.6 s of CPU time.

python -m tests.train.node_forks: each line of stdin is a node (JSON), each of stdout the ID of its process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class ForkedNode:
    """A node's process, as far as tests use a Popen."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self._code = pid, code

    def poll(self) -> int | None:
        return int(self._code.read_text()) if self._code.exists() else None

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("node", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_node(
    argv: Sequence[str], timing: Mapping[str, float], env: Mapping[str, str], cwd: Path, log: Path, errors: Path
) -> ForkedNode:
    """Start `launch_train.node ARGV` in a folder; its output goes to files."""
    files = {"cwd": str(cwd), "log": str(log), "errors": str(errors), "code": f"{log}.code"}
    log.touch()
    errors.touch()
    server = _server()
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps({"argv": argv, "timing": timing, "env": env, **files}) + "\n")
    server.stdin.flush()
    return ForkedNode(int(server.stdout.readline()), Path(files["code"]))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """This module as a process, which ends with this one."""
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Fork nodes until stdin ends; write the exit code of each to its file."""
    codes: dict[int, Path] = {}
    while True:
        if select.select([0], [], [], 0.02)[0]:
            if not (line := sys.stdin.readline()):
                return
            node = json.loads(line)
            if not (pid := os.fork()):
                run(node)
            codes[pid] = Path(node["code"])
            print(pid, flush=True)
        for pid in list(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = codes.pop(pid)
                code.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
                code.with_suffix(".new").rename(code)


def run(node: dict[str, Any]) -> None:
    """Be a node, to its end."""
    from launch_train.node.__main__ import main
    from launch_train.node.control_store import Timing

    os.setsid()
    os.chdir(node["cwd"])
    os.environ.clear()
    os.environ.update(node["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in ((1, node["log"]), (2, node["errors"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    random.seed()
    code = 70
    try:
        code = main(node["argv"], timing=Timing(**node["timing"]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    gc.disable()
    import torch.distributed

    import launch_train.node.__main__  # noqa: F401 - each fork has it

    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()
    serve()

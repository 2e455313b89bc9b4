"""Training loops that take turns: each in processes of its own, so many steps at a time, while the others wait.

A slow moment of the machine hits all of them alike, and no loop's threads share an interpreter with another's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
LINE = "BENCHMARK_LINE"
"""The number of the descriptor by which rank 0 hears from whoever measures."""


class Turns:
    """In the loop's process: `step` is called before each step, and returns when it may be done."""

    def __init__(self, line: socket.socket | None) -> None:
        self._line, self._left, self._wall, self._cpu = line, 0, 0.0, 0.0

    def step(self) -> None:
        if self._line is None:  # another rank: it waits for rank 0 in the step's own collective
            return
        if self._left == 0:
            self._next(self._line)
        self._left -= 1

    def _next(self, line: socket.socket) -> None:
        if self._wall:
            _finished()
            line.sendall(f"{time.perf_counter() - self._wall} {time.process_time() - self._cpu}\n".encode())
        else:
            line.sendall(b"ready\n")
        word = line.recv(64)
        if not word:
            os._exit(0)
        self._left, self._wall, self._cpu = int(word), time.perf_counter(), time.process_time()


def here() -> Turns:
    """This process's. On a rank behind the first it waits for nobody."""
    line = os.environ.get(LINE)
    return Turns(socket.socket(fileno=int(line)) if line else None)


def _finished() -> None:
    """A GPU has queued what it was told to do: wait until it's done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- Whoever measures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """One that takes part: its title, the program, what it is told (JSON), and its number of ranks."""

    title: str
    program: str
    told: Mapping[str, Any]
    ranks: int = 1


@dataclass
class Measured:
    """Seconds for a step, wall and CPU (of rank 0), in each turn."""

    loop: Loop
    wall: list[float]
    cpu: list[float]

    @property
    def seconds(self) -> float:
        return median(self.wall)

    def ratio(self, other: Measured) -> float:
        """How much faster than `other`: the median over the turns, each beside the other's."""
        return median(theirs / ours for ours, theirs in zip(self.wall, other.wall, strict=True))


def measure(loops: Sequence[Loop], *, turns: int, steps: int, warm_up: int) -> list[Measured]:
    """All loops in turns. The order is turned round each time: being the first after a pause is no advantage."""
    found = [Measured(loop, [], []) for loop in loops]
    with ExitStack() as stack:
        lines = [stack.enter_context(_started(loop)) for loop in loops]
        for line in lines:
            _told(line, warm_up)
        for turn in range(turns):
            order = list(zip(found, lines, strict=True))
            for one, line in order if turn % 2 else order[::-1]:
                wall, cpu = _told(line, steps)
                one.wall.append(wall / steps)
                one.cpu.append(cpu / steps)
    return found


def _told(line: Any, steps: int) -> tuple[float, float]:
    line.write(f"{steps}\n")
    line.flush()
    wall, cpu = line.readline().split()
    return float(wall), float(cpu)


@contextmanager
def _started(loop: Loop) -> Iterator[Any]:
    """The loop's ranks, until the block ends; a text stream to rank 0, which is ready."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.loops", loop.program, json.dumps(loop.told)]
    ranks = []
    for rank in range(loop.ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1", **_as_torchrun(rank, loop.ranks, port)}
        if rank == 0:
            env[LINE] = str(theirs.fileno())
        given = (theirs.fileno(),) if rank == 0 else ()
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=given, stdout=subprocess.DEVNULL))
    theirs.close()
    stream = ours.makefile("rw")
    try:
        if stream.readline() != "ready\n":
            raise RuntimeError(f"{loop.title} did not come to its first step")
        yield stream
    finally:
        stream.close()
        ours.close()
        for process in ranks:
            process.kill()
            process.wait()


def _as_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets, for several ranks."""
    if world == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}
    return {name: str(number) for name, number in numbers.items()} | names

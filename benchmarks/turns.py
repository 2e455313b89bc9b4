"""Run training loops in turns: each in its own processes, some steps at a time, while the others wait.

A slow moment of the machine thus affects all loops, and no loop shares an interpreter with another. The placement of a
process in memory changes its speed by some percent for as long as it lives, so all loops are restarted in each round.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from benchmarks.tables import Loop, Measured, Turn

ROOT = Path(__file__).parent.parent
LINE = "BENCHMARK_LINE"
"""Environment variable with the file descriptor on which a rank talks to the measuring process."""

Some = TypeVar("Some")


class Turns:
    """Used in the loop's process: call `step` before each step; it blocks until the step may run."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._left, self._wall, self._cpu = line, 0, 0.0, 0.0

    def step(self) -> None:
        if self._left == 0:
            self._next()
        self._left -= 1

    def _next(self) -> None:
        """Wait for the next turn. All ranks wait here: waiting for others inside a step would count as a long step."""
        if self._wall:
            _finished()
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            self._line.sendall(f"{wall} {cpu}\n".encode())
        else:
            self._line.sendall(b"ready\n")
        word = self._line.recv(64)
        if not word:
            os._exit(0)
        self._left, self._wall, self._cpu = int(word), time.perf_counter(), time.process_time()


def here() -> Turns:
    """Return the turns of this process."""
    return Turns(socket.socket(fileno=int(os.environ[LINE])))


def _finished() -> None:
    """Wait until the GPU has finished its queued work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- The measuring process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """Amount of measurement: each round restarts every loop and gives it `turns` of `steps` steps after a warm-up.

    `together`: all loops of a round run at once and alternate. Otherwise one loop after the other has all its turns, as
    on a GPU, whose memory has room for one loop only.
    """

    rounds: int
    turns: int
    steps: int
    warm_up: int = 10
    together: bool = True


def measure(loops: Sequence[Loop], amount: Amount) -> list[Measured]:
    """Measure the loops. Raises RuntimeError if a loop exits early.

    Of loops that do not run together, one that exits is dropped and the others continue, unless it is the first, which
    is the baseline.
    """
    with tempfile.TemporaryDirectory() as folder:
        rounds = [_round(loops, amount, number, Path(folder)) for number in range(amount.rounds)]
        said = [_output(loop, Path(folder)).read_text(encoding="utf-8", errors="replace") for loop in loops]
    found = [Measured(*each) for each in zip(loops, zip(*rounds, strict=True), said, strict=True)]
    return [one for one in found if all(one.rounds)]


def _round(loops: Sequence[Loop], amount: Amount, number: int, folder: Path) -> list[list[Turn]]:
    """Return the turns of each loop. The loops start in a different order in each round."""
    found: list[list[Turn]] = [[] for _ in loops]
    groups = [list(range(len(loops)))] if amount.together else [[place] for place in range(len(loops))]
    for group in turned(groups, number):
        try:
            with started([loops[place] for place in group], folder) as running:
                _take_turns(list(zip([found[place] for place in group], running, strict=True)), amount, number)
        except RuntimeError as error:
            if 0 in group:
                raise
            print(error, file=sys.stderr, flush=True)
            found[group[0]].clear()
    return found


def _take_turns(pairs: Sequence[tuple[list[Turn], Running]], amount: Amount, number: int) -> None:
    """Run a round, and append each loop's turns to its list."""
    for _, one in pairs:
        one.take(amount.warm_up)
    for turn in range(amount.turns):
        for found, one in turned(pairs, number + turn):
            found.append(one.take(amount.steps))


def _output(loop: Loop, folder: Path) -> Path:
    """Return the file for the output of rank 0."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', loop.title.lower())}.out"


def turned(items: Sequence[Some], by: int) -> list[Some]:
    """Rotate the items, and reverse them every second time.

    Running first, or after a certain loop, may be an advantage.
    """
    start = by // 2 % len(items)
    found = [*items[start:], *items[:start]]
    return found[::-1] if by % 2 else found


@contextmanager
def started(loops: Sequence[Loop], folder: Path) -> Iterator[list[Running]]:
    """Start all loops at once, and yield them when they are ready for their first step. Stop them at the end."""
    with ExitStack() as stack:
        running = [stack.enter_context(closing(Running(loop, folder))) for loop in loops]
        for one in running:
            one.heard(_ready)
        yield running


def _ready(line: str) -> None:
    if line != "ready\n":
        raise ValueError


def _numbers(line: str) -> tuple[float, float]:
    wall, cpu = line.split()
    return float(wall), float(cpu)


class Running:
    """The processes of a loop. Its caches, and its run folder if it writes one, are in `folder`."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        self._loop = loop
        self._lines: list[TextIO] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        shared = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        if loop.told.get("writes"):
            shared["LAUNCH_RUN_FOLDER"] = tempfile.mkdtemp(prefix="run-", dir=folder)
        for rank in range(loop.ranks):
            env = {**os.environ, **shared, **_as_torchrun(rank, loop.ranks, port)}
            self._start(env, Path(os.devnull) if rank else _output(loop, folder))

    def _start(self, env: Mapping[str, str], output: Path) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.loops", self._loop.program, json.dumps(self._loop.told)]
        with ours, theirs, output.open("wb") as file:
            line, told = theirs.fileno(), {**env, LINE: str(theirs.fileno())}
            process = subprocess.Popen(command, cwd=ROOT, env=told, pass_fds=(line,), stdout=file)
            self._processes.append(process)
            self._lines.append(ours.makefile("rw"))

    def take(self, steps: int) -> Turn:
        """Run one turn of `steps` steps; return the slowest rank's wall time and the CPU time of all."""
        for line in self._lines:
            line.write(f"{steps}\n")
            line.flush()
        walls, cpus = zip(*self.heard(_numbers), strict=True)
        return Turn(max(walls) / steps, sum(cpus) / steps)

    def heard(self, read: Callable[[str], Some]) -> list[Some]:
        """Read a line from each rank. Raises RuntimeError if a rank has exited."""
        try:
            return [read(line.readline()) for line in self._lines]
        except (ValueError, ConnectionError) as error:
            raise RuntimeError(f"{self._loop.title} ended while it was measured; its messages are above") from error

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for line in self._lines:
            line.close()


def _free_port() -> int:
    """Return a free port below Linux's ephemeral range (32768 and up), so that no connection takes it before rank 0."""
    while True:
        port = random.randrange(20000, 30000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _as_torchrun(rank: int, world: int, port: int) -> dict[str, Any]:
    """Return the environment that torchrun sets, for several ranks."""
    if world == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark"}
    return {name: str(number) for name, number in numbers.items()} | names

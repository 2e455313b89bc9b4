"""Ranks by fork of a process that has torch already, with this process in torchrun's place: as soon as a rank fails,
the others are told to end. Start to end of a job takes a second or less. Tests ask it by the fixture `forked`
(tests.train.forked).

python -m tests.train.forking MODULES: each line of stdin is a job (JSON), each of stdout how it ended.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

AT_ONCE = 6
GRACE, LIMIT = 30.0, 240.0
"""Seconds after which torchrun kills what it has told to end (--shutdown-timeout), and a job is given up."""


class Job:
    """The ranks of one run."""

    def __init__(self, job: dict[str, Any]) -> None:
        """`job`: out (a folder), ranks, env; optionally

        - number, by which its owner knows it,
        - argv: a module to run instead of `train`, and its arguments,
        - hook: Python code that each rank runs first,
        - apart: a rank that fails does not end the others,
        - limit: seconds after which the job is given up.
        """
        self.job, self.out, self.world = job, Path(job["out"]), int(job["ranks"])
        env = dict(job["env"])
        self._store = 0
        if self.world > 1:
            self._store, port = _store()
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.world)}
            env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": str(self.world)}
        self._began, self._failed, self._ended = time.time(), 0.0, 0.0
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.world > 1 else {} for rank in range(self.world)]
        self._pids = {
            _forked(self.out / str(rank), {**env, **own}, job.get("argv") or [], job.get("hook") or ""): rank
            for rank, own in enumerate(ranks)
        }
        self._codes = dict[int, int]()

    def poll(self) -> dict[str, Any] | None:
        """How it ended; None while it runs."""
        for pid in list(self._pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._codes[self._pids.pop(pid)] = os.waitstatus_to_exitcode(status)
                self._ended = time.time()
                if status and not self._failed and not self.job.get("apart"):
                    self._failed = self._ended
                    self._signal(signal.SIGTERM)
        late = self._failed and time.time() - self._failed > GRACE
        if late or time.time() - self._began > self.job.get("limit", LIMIT):
            self._signal(signal.SIGKILL)
        return None if self._pids else self._told()

    def _signal(self, signum: int) -> None:
        for pid in self._pids:
            os.kill(pid, signum)

    def end(self) -> None:
        """Leave nothing behind."""
        self._signal(signal.SIGKILL)
        if self._store:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
            self._store = 0

    def _told(self) -> dict[str, Any]:
        self.end()
        errors = [self.out / f"{rank}.err" for rank in range(self.world)]
        spoke = [path.stat().st_mtime for path in errors if path.stat().st_size]
        return {
            "number": self.job.get("number"),
            "codes": [self._codes[rank] for rank in range(self.world)],
            "errors": [path.read_text() for path in errors],
            "outputs": [(self.out / f"{rank}.out").read_text() for rank in range(self.world)],
            "after": self._ended - min(spoke, default=self._ended),
            "seconds": self._ended - self._began,
        }


def _store() -> tuple[int, int]:
    """A process that is torchrun's store for a job, and its port."""
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        port = int(os.read(reading, 64))
        os.close(reading)
        return pid, port
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it, untyped

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    os.write(writing, str(store.port).encode())
    while True:
        signal.pause()


def _forked(out: Path, env: dict[str, str], argv: list[str], hook: str) -> int:
    """A rank: `python -m launch_train`, but for the start of Python. With LACKING it has no such module."""
    files = [os.open(out.with_suffix(name), os.O_CREAT | os.O_TRUNC | os.O_WRONLY) for name in (".out", ".err")]
    if pid := os.fork():
        for file in files:
            os.close(file)
        return pid
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if lacking := env.get("LACKING"):
        sys.modules[lacking] = None  # type: ignore[assignment]  # so Python spells that it can't be imported
    code = 99
    try:
        exec(hook, {})
        sys.argv = argv or ["launch_train"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:  # noqa: BLE001 - as Python at its end
        traceback.print_exc()
    finally:
        os._exit(code)


class Lines:
    """The lines of stdin, without waiting for those that are still to come."""

    def __init__(self) -> None:
        self.rest, self.ended = b"", False

    def next(self, wait: bool) -> str:
        """Empty if there is none yet, or (`ended`) none any more."""
        while b"\n" not in self.rest and not self.ended and select.select([0], [], [], None if wait else 0)[0]:
            data = os.read(0, 1 << 16)
            self.rest, self.ended = self.rest + data, not data
        line, _, self.rest = self.rest.partition(b"\n") if b"\n" in self.rest or self.ended else (b"", b"", self.rest)
        return line.decode()


def serve() -> None:
    """Some at a time, in any order."""
    running = list[Job]()
    try:
        _serve(Lines(), running)
    finally:
        for job in running:
            job.end()


def _serve(jobs: Lines, running: list[Job]) -> None:
    while not jobs.ended or jobs.rest or running:
        while len(running) < AT_ONCE and (line := jobs.next(wait=not running)):
            running.append(Job(json.loads(line)))
        for job in list(running):
            if told := job.poll():
                running.remove(job)
                print(json.dumps(told), flush=True)
        time.sleep(0.01)


def main(preloaded: list[str]) -> None:
    from importlib import import_module

    gc.disable()  # as in launch_train.node.torchrun_preloaded
    import torch

    for name in preloaded:
        import_module(name)
    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()
    serve()


if __name__ == "__main__":
    main(sys.argv[1:])

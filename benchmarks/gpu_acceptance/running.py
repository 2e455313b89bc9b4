"""Run each row in a separate process: even if it crashes, hangs or fills the GPU, the next row runs.

The process is forked from this one, which has torch loaded but has never used CUDA. This saves each row some seconds of
start-up. If a forked process does not see the GPU, rows are started as fresh processes (`fresh`).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_acceptance.tasks import MARK, ROOT, Place, SkipRow, Task

PLACE: Final = "place.json"
RESULT: Final = "result.json"
PRINTED: Final = "printed.txt"
LAST_LINES: Final = 25


@dataclass
class Running:
    """A running row."""

    task: Task
    place: Place
    limit: float
    pid: int
    began: float = field(default_factory=time.monotonic)
    killed: bool = False

    def poll(self) -> bool:
        """Return whether the row has ended. Past its limit, kill it with everything that it started."""
        done, _ = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.began > self.limit
        if not done and late:
            self.killed = True
            self.kill()
            os.waitpid(self.pid, 0)
        if done:
            self.kill()  # processes that it left behind
        return bool(done) or late

    def kill(self) -> None:
        """Kill the process group, and programs in other groups: nothing may keep GPU memory."""
        for one, end in ((self.pid, os.killpg), *((pid, os.kill) for pid in _marked(str(self.place.folder)))):
            with suppress(ProcessLookupError, PermissionError):
                end(one, signal.SIGKILL)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def printed(self) -> str:
        try:
            return (self.place.folder / PRINTED).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def result(self) -> Mapping[str, Any]:
        """Return {"measured": …}, {"skip": why} or {"error": why}.

        Returns {"cut off": seconds} if the session ended before the task's own limit.
        """
        try:
            found: Mapping[str, Any] = json.loads((self.place.folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            if self.killed and self.limit < self.place.within(self.task.limit):
                return {"cut off": self.limit}
            return {
                "error": f"killed after {self.limit:.0f} s" if self.killed else "its process ended without a result"
            }
        return found


def _marked(folder: str) -> Iterator[int]:
    """Find programs that rows in a folder have started, by their environment (`Place.env`)."""
    mark = f"{MARK}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(one.startswith(mark) for one in (entry / "environ").read_bytes().split(b"\0")):
                yield int(entry.name)


def start(task: Task, place: Place, limit: float, *, fresh: bool = False) -> Running:
    """Start a row's work, and create its scratch folder."""
    place.folder.mkdir(parents=True)
    return Running(task, place, limit, (_spawned if fresh else _forked)(task, place))


def _forked(task: Task, place: Place) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's threads sleep; they hold no lock
        pid = os.fork()
    if pid:
        return pid
    os.setsid()
    _die_with_the_parent()
    with (place.folder / PRINTED).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115 - open until the process ends
    code = 1
    try:
        os.chdir(place.folder)
        work(task, place)
        code = 0
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_the_parent() -> None:
    """Kill the row if the command is killed: it must not keep the GPU."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


PR_SET_PDEATHSIG: Final = 1


def _spawned(task: Task, place: Place) -> int:
    """Start a fresh process. The place is passed in a file: Linux limits an argument to 128 KiB."""
    file = place.folder / PLACE
    file.write_text(json.dumps({"tiny": place.tiny, "gpus": place.gpus, "known": dict(place.known)}), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "train"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--row", task.key, str(file)]
    with (place.folder / PRINTED).open("wb") as printed:
        process = subprocess.Popen(
            command,
            cwd=place.folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process.returncode = 0  # `Running` waits for it
    return process.pid


def work(task: Task, place: Place) -> None:
    """Do a row's work in its own process, and write the result to its folder."""
    try:
        found: dict[str, Any] = {"measured": dict(task.work(_single_threaded(place)))}
    except SkipRow as reason:
        found = {"skip": str(reason)}
    except BaseException as error:  # noqa: BLE001 - any error is the row's result
        traceback.print_exc()
        found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    path = place.folder / RESULT
    path.with_suffix(".new").write_text(json.dumps(found, default=_plain), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def _single_threaded(place: Place) -> Place:
    """Use one thread per row on a CPU, where several run at once."""
    if not place.gpus:
        import torch

        torch.set_num_threads(1)
    return replace(place)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def program(argv: Sequence[str], place: Place, seconds: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program of a row to its end; its output is the row's too. Raises RuntimeError if it fails."""
    done = subprocess.run(
        argv,
        env={**place.env, **env},
        cwd=place.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=place.within(seconds),
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode:
        raise RuntimeError(
            f"{Path(argv[0]).name} {' '.join(argv[1:4])} ended with {done.returncode}: {last(done.stdout, 3)}"
        )
    return done


def torchrun(world: int) -> list[str]:
    """Return a single-node torchrun command; it uses localhost because the host name may not resolve."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    return [*command, f"--nproc-per-node={world}"]


def last(text: str, lines: int = LAST_LINES) -> str:
    """Return the last lines that are not empty."""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])

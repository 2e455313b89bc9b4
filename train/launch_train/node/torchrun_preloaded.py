"""Run torchrun in a process that imports everything once: `python torchrun_preloaded.py MODULE [ARGS...]`.

Without ARGS, torchrun's arguments, the process imports at low priority and then waits for JSON on stdin: {"argv": ARGS,
"env": variables that have changed since it was started, null for removed ones}. A restart that finds such a process
need not wait for imports. It exits if stdin ends without JSON.

Ranks that run MODULE, launch's own trainer, are forked from this process before torchrun starts: it has imported what
they need, and has neither initialized CUDA nor started threads. Another MODULE ("" for a script) changes nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, ClassVar, Final, NoReturn

TRAINER: Final = "launch_train"
PRELOADED: Final = ("launch_train.trainer.train", "launch_train.distributed.process_group")
"""What TRAINER imports at its start."""
HANDLER: Final = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""With the class by which torchrun starts ranks: private, so another release of PyTorch may not have it."""
COMMAND: Final = (sys.executable, "-u", "-m", TRAINER)
"""A rank's command as torchrun makes it, without arguments."""
PROCESSES: Final = "--nproc-per-node="
LOWEST_PRIORITY: Final = 19
ENDING_SECONDS: Final = 5.0
"""Time for a thread that has been joined to end; at the lowest priority on a busy machine it may take a while."""


def main(module: str, argv: Sequence[str]) -> int:
    """Import, wait for the arguments if there are none, and run torchrun. Returns its exit code."""
    gc.disable()  # as in launch_train.__main__
    folder = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != folder]  # Python 3.10 ignores -P
    loaded: list[bool] = []
    # Without privileges a process that has lowered its priority can't raise it again: a thread does it and ends.
    importing = threading.Thread(target=lambda: loaded.append(import_trainer(module, low_priority=not argv)))
    importing.start()
    importing.join()
    if not loaded:  # its traceback is printed
        return 1
    if not argv:
        text = sys.stdin.buffer.read()
        if not text:
            return 0
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        request = json.loads(text)
        argv = request["argv"]
        set_environ({**os.environ, **request["env"]})
    gc.freeze()
    if loaded[0] and is_alone():
        processes = next(word for word in argv if word.startswith(PROCESSES)).removeprefix(PROCESSES)
        start_in_forks([ForkedRank() for _ in range(int(processes))])
    from launch_train.node import torchrun_wrapper

    return torchrun_wrapper.main(argv)


def import_trainer(module: str, *, low_priority: bool) -> bool:
    """Import torchrun, and what `module` needs. Returns whether its ranks can be forked."""
    if low_priority and sys.platform == "linux":  # elsewhere it would be that of the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    from launch_train.node import torchrun_wrapper  # noqa: F401 - it imports torchrun

    # A sitecustomize of the user's runs in each rank (node/sitecustomize).
    if module != TRAINER or getattr(sys.modules.get("sitecustomize"), "hidden", True):
        return False
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        handler = importlib.import_module(HANDLER).SubprocessHandler
    except Exception:  # noqa: BLE001 - each rank reports it when it imports the same
        return False
    return hasattr(handler, "_popen") and not is_mapped("libcuda.so")


def is_mapped(library: str) -> bool:
    """Return whether a library is in this process's memory; True if unknown.

    After a fork of a process that has initialized CUDA it can't be used, and nobody initializes it without its driver's
    library.
    """
    with suppress(OSError):
        return library in Path("/proc/self/maps").read_text(errors="replace")
    return True


def is_alone() -> bool:
    """Return whether this process has no other thread, after some time for those that are ending.

    A fork copies the locks that other threads hold, and nobody opens them in the copy. `Thread.join` returns before the
    native thread has ended: its destructors still free what MKL has allocated, under MKL's lock.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 -- names alone
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class ForkedRank(subprocess.Popen[bytes]):
    """A rank that waits for its environment; to torchrun it is a process like any other."""

    _pipes: ClassVar[list[int]] = []
    """The ends of the ranks' pipes in this process."""

    def __init__(self) -> None:
        super().__init__(COMMAND)

    def _execute_child(self, *_arguments: object) -> None:
        """Fork, where Popen would execute a program."""
        reading, writing = os.pipe()
        self._pipes.append(writing)
        self._pipe = writing
        self.pid, self._child_created = os.fork(), True
        if not self.pid:
            try:
                run_rank(reading, self._pipes)
            except BaseException:  # noqa: BLE001 - as of any process, whose hook also records it
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        os.close(reading)

    def begin(self, arguments: Sequence[str], env: Mapping[str, str], files: Sequence[IO[str] | None]) -> None:
        """Let the rank run COMMAND with `arguments`. `files`: stdout and stderr; None: as this process."""
        outputs = [file and file.name for file in files]
        # torchrun notices a rank that has exited.
        with suppress(BrokenPipeError), os.fdopen(self._pipe, "w") as pipe:
            json.dump({"arguments": arguments, "env": env, "outputs": outputs}, pipe)


def start_in_forks(ranks: list[ForkedRank]) -> None:
    """Let torchrun take its ranks from `ranks` instead of starting a Python process each."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    start_process = SubprocessHandler._popen

    def start(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        if not ranks or args[: len(COMMAND)] != COMMAND:  # PYTHON_EXEC, NUMA binding
            return start_process(handler, args, env)
        rank = ranks.pop(0)
        rank.begin(args[len(COMMAND) :], env, (handler._stdout, handler._stderr))
        return rank

    SubprocessHandler._popen = start  # type: ignore[method-assign,assignment]  # `self` is called handler


def run_rank(reading: int, pipes: Sequence[int]) -> NoReturn:
    """Wait for `ForkedRank.begin`, and then be the process of COMMAND, in its own session."""
    for pipe in pipes:
        os.close(pipe)
    os.setsid()
    with os.fdopen(reading) as file:
        text = file.read()
    if not text:  # torchrun has exited
        os._exit(0)
    request = json.loads(text)
    set_environ(request["env"])
    for number, path in enumerate(request["outputs"], start=1):
        if path:
            os.dup2(os.open(path, os.O_WRONLY), number)
    with suppress(OSError):  # in /proc, the command line and the environment are those of torchrun
        Path("/proc/self/comm").write_text(f"rank {request['env']['RANK']}")
    sys.modules["sitecustomize"].prepare_rank()
    gc.enable()
    sys.argv = [TRAINER, *request["arguments"]]
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)
    os._exit(0)


def set_environ(env: Mapping[str, str | None]) -> None:
    """Set the environment variables, and remove all others and those that are None."""
    values = {name: value for name, value in env.items() if value is not None}
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

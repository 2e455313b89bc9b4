"""Makes every Python process that the node starts write whole lines, find the user's code, and write its stacks on a
signal of the node; the folder is first on their PYTHONPATH.

An unbuffered Python (torchrun starts its workers with -u) writes the text and the end of a print() separately, so that
the lines of processes which share one pipe are torn: 15 % of them when two ranks print at the same time. Written line
by line, as to a terminal, each print is one write, which a pipe keeps together up to 4096 bytes (pipe(7), PIPE_BUF).

The user's code is not on PYTHONPATH, which comes before Python's standard library: a queue.py there would be imported
by the library itself. It comes behind the library, and before what is installed, as beside a script.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _write_whole_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _find_the_code() -> None:
    folder, library = os.environ.get("LAUNCH_CODE"), Path(os.__file__).parent  # train.contract.CODE
    if folder and folder not in sys.path:
        own = [at for at, entry in enumerate(sys.path) if Path(entry) in (library, library / "lib-dynload")]
        sys.path.insert(max(own, default=len(sys.path) - 1) + 1, folder)


def _write_stacks_when_asked() -> None:
    """faulthandler does so from C, whatever the process hangs in. See train/node/hangs.py, SIGNAL."""
    if folder := os.environ.get("LAUNCH_WATCH"):  # train.contract.WATCH
        import faulthandler
        import signal

        with suppress(OSError, ValueError):  # the node has ended; a thread
            file = (Path(folder) / str(os.getpid())).open("a")
            faulthandler.register(getattr(signal, "SIGRTMAX", signal.SIGUSR2), file)


def _run_the_one_behind() -> None:
    """Python imports one sitecustomize only: the machine's own must not be lost to ours."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != here])
    if spec and spec.loader:
        spec.loader.exec_module(module_from_spec(spec))


_write_whole_lines()
_find_the_code()
_write_stacks_when_asked()
_run_the_one_behind()

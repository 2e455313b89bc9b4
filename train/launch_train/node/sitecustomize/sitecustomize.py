"""Prepare every Python process that the node starts: whole lines, the path of the user's code, records of uncaught
exceptions, and stacks on a signal of the node. This folder is first on their PYTHONPATH.

An unbuffered Python (torchrun starts its workers with -u) writes the text and the newline of a print() separately, so
lines of processes that share a pipe are interleaved: 15 % of them when two ranks print at the same time. With line
buffering, as in a terminal, each print is one write, which a pipe keeps together up to 4096 bytes (pipe(7), PIPE_BUF).

The user's code is not on PYTHONPATH, which precedes the standard library: the library itself would import a queue.py
there. The script's folder and the code's own come after the library and before installed packages.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import TracebackType


def _add_code_to_path() -> None:
    code, library = os.environ.get("LAUNCH_CODE"), Path(os.__file__).parent  # launch_train.common.contract.CODE
    if code:
        standard = [at for at, entry in enumerate(sys.path) if Path(entry) in (library, library / "lib-dynload")]
        at = max(standard, default=len(sys.path) - 1) + 1
        sys.path[at:at] = [folder for folder in _code_folders(Path(code)) if folder not in sys.path]


def _code_folders(code: Path) -> list[str]:
    """Return the folder of the script that this process runs, if it is one of the code, and the folders of the code.

    Python itself adds a script's folder, unless PYTHONSAFEPATH is set, which it is in the image.
    """
    script, package = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[2]
    is_own = script.is_file() and script.is_relative_to(code) and not script.is_relative_to(package)
    path = os.environ.get("LAUNCH_CODE_PATH", str(code)).split(os.pathsep)  # launch_train.common.contract.CODE_PATH
    return list(dict.fromkeys([*([str(script.parent)] if is_own else []), *path]))


def _record_failures() -> None:
    """See train/launch_train/common/faults.py. The subprocesses of a script are not recorded."""
    if os.environ.get("LAUNCH_FAULTS"):  # launch_train.common.contract.FAULTS
        rank = os.environ.get("RANK", "")
        owner = os.environ.get("LAUNCH_FAULTS_OWNER", "")  # launch_train.common.faults.OWNER
        if not owner.startswith(f"{rank}:"):
            os.environ["LAUNCH_FAULTS_OWNER"] = f"{rank}:{os.getpid()}"
        sys.excepthook = _report_uncaught


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    try:
        faults = sys.modules.get("launch_train.common.faults")
        if not hasattr(faults, "report"):  # not imported yet
            path = Path(__file__).parents[2] / "common" / "faults.py"
            spec = spec_from_file_location("launch_faults", path)
            faults = module_from_spec(spec)  # type: ignore[arg-type]  # it exists
            spec.loader.exec_module(faults)  # type: ignore[union-attr]  # a file's spec has a loader
        faults.report(error.with_traceback(trace))  # type: ignore[union-attr]  # it has `report`
    except Exception:  # noqa: BLE001 - the error itself matters more
        sys.__excepthook__(kind, error, trace)


def _write_stacks_on_signal() -> None:
    """Register faulthandler, which writes stacks from C, whatever the process hangs in. See
    train/launch_train/node/hang_detection.py, SIGNAL."""
    if folder := os.environ.get("LAUNCH_WATCH"):  # launch_train.common.contract.WATCH
        import faulthandler
        import signal

        with suppress(OSError, ValueError):  # the node has ended; a thread
            file = (Path(folder) / str(os.getpid())).open("a")
            faulthandler.register(getattr(signal, "SIGRTMAX", signal.SIGUSR2), file)


def prepare_rank() -> None:
    """Do what depends on the variables of a rank, once they are set."""
    _record_failures()
    _write_stacks_on_signal()


for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):  # whole lines, so that those of several processes don't mix
        stream.reconfigure(line_buffering=True, write_through=False)
_add_code_to_path()
prepare_rank()
# The sitecustomize that this one hides: Python imports only one.
here = Path(__file__).resolve().parent
hidden = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != here])
if hidden and hidden.loader:
    hidden.loader.exec_module(module_from_spec(hidden))

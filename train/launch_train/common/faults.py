"""Record uncaught exceptions for the node, and print one traceback for all ranks and restarts that fail alike.

Standard library only, and nothing of this package: processes that haven't imported the package load this file by its
path (train/launch_train/node/sitecustomize/sitecustomize.py).
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = "LAUNCH_FAULTS"
"""launch_train.common.contract.FAULTS."""
CODE: Final = "LAUNCH_CODE"
"""launch_train.common.contract.CODE."""
OWNER: Final = "LAUNCH_FAULTS_OWNER"
"""The process whose failure counts, as RANK:PID (RANK is empty without torchrun): the first Python process with this
RANK. Failures of its subprocesses are the script's own business."""

PRINTED: Final = "printed-"
"""Prefix of files that mark a kind of failure whose traceback was printed."""
STEPPED: Final = "stepped"
"""A file that exists once a process has completed a step."""
LOGGED: Final = "logged"
"""A file that exists once a process logs rows of metrics itself (launch_train.metrics.log)."""
MAX_TEXT: Final = 200
"""Characters of an error's text that are recorded."""

PEER: Final = re.compile(
    r"gloo/|Connection (closed|reset) by peer|Connection was likely closed|Broken pipe"
    r"|ncclRemoteError|ncclSystemError|remote process exited|communicator was aborted|Some NCCL operations have failed"
    r"|collective operation timeout|wait timeout after|Timed out waiting .* for (send|recv) operation"
)
"""Errors of gloo, NCCL and torch's store on a rank after another one has exited: a consequence, never a cause."""

TRANSIENT: Final = re.compile(
    r"timed out|unavailable|DEADLINE_EXCEEDED|Too Many Requests|\b50[0234] (Server Error|Internal|Bad Gateway|Gateway)"
    r"|uncorrectable ECC|unspecified launch failure|hardware stack error|NVLink"
    r"|_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|DataLoader worker .*(killed by signal|exited unexpectedly)",
    re.IGNORECASE,
)
"""Errors of servers, GPUs and killed processes, in the text of any exception."""

OF_OTHERS: Final = ("CalledProcessError", "ChildFailedError", "ProcessExitedException", "ProcessRaisedException")
"""Exceptions that report the failure of another process. mp.spawn's end with that one's own error."""

LASTING: Final = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""OSErrors that are permanent, unlike those of the network or of a failing disk."""

NO_LIBRARY: Final = "cannot open shared object file"
"""ImportError of a native library that this machine lacks; another machine may have it."""
DOWNLOADED: Final = ("datasets_modules", "transformers_modules")
"""Packages that Hugging Face's libraries write at runtime: one rank may import what another one is writing."""

STORE_SECONDS: Final = 1.0

NO_GPU: Final = re.compile(
    r"no attribute '_cuda_|not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver"
    r"|CUDA driver version is insufficient|libcuda\.so|requires (a )?CUDA (support|or other accelerator)"
    r"|doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs|Cannot get CUDA generator"
    r"|accelerator device when none is available|torch\.cuda\.is_available\(\) is False"
    r"|dummy base class (CUDAGraph|Event|Stream)|0 active drivers|Unknown backend:? '?(gpu|cuda)|no CUDA-capable device"
)
"""Errors of torch, Triton and JAX if CUDA is used on a machine, or with a build, without it."""

NEEDS_GPU: Final = "this script needs a GPU"

step: int | None = None
"""The newest step that this process has reported as complete."""


class Fault(NamedTuple):
    """One uncaught exception. `place` is file:line of the innermost frame in the user's code, else of all."""

    error: str
    place: str
    step: int | None
    rank: int | None
    pid: int
    peer: bool
    """It is only a consequence: another rank has exited."""
    transient: bool
    """It may not recur, even at the same step."""
    permanent: bool
    """No restart can help: the user's code can't be loaded."""

    @property
    def kind(self) -> str:
        """The exception's name and its place, which ranks that fail alike have in common."""
        return f"{self.error.partition(':')[0]} {self.place}"

    @property
    def recurring(self) -> tuple[str, int | None, str] | None:
        """The key that a second failure shares with the first if it is the same one; None if a restart may help.

        Where the step is unknown the text counts too.
        """
        if self.transient:
            return None
        return (self.kind, self.step, "" if self.step else self.error)

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.place, f"after step {self.step}" if self.step else "")))
        return with_gpu_hint(f"{self.error} ({where})" if where else self.error)


def with_gpu_hint(text: str) -> str:
    """Return an error's text, with a hint if the cause is a missing GPU."""
    return f"{text}: {NEEDS_GPU}" if NO_GPU.search(text) and NEEDS_GPU not in text else text


def report(error: BaseException, *, visible: bool = True) -> None:
    """Record an uncaught exception, and print its traceback unless `visible` is false or one of its kind was printed.

    A peer's error gets one line without a traceback, and none if the original failure was printed.
    """
    folder, fault = _folder(), None
    if folder and not isinstance(error, KeyboardInterrupt):
        with suppress(Exception):  # whatever fails here, the error itself is printed
            fault = fault_of(error)
            part = folder / f"{fault.pid}.new"
            part.write_text(json.dumps(fault))
            part.replace(part.with_suffix(".json"))
    if not visible or (folder and fault and _was_printed(folder, fault)):
        return
    if fault and fault.peer:
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(type(error), error, error.__traceback__)


def _folder() -> Path | None:
    """Return the folder for this process's record; None outside of a run, and in a script's subprocesses."""
    name, pid = os.environ.get(FOLDER), str(os.getpid())
    return Path(name) if name and os.environ.get(OWNER, pid).rpartition(":")[2] == pid else None


def _was_printed(folder: Path, fault: Fault) -> bool:
    """Return whether another process or an earlier start has printed this failure, or any, if it is a peer's error.

    If not, this process claims to print it.
    """
    try:
        if fault.peer and any(folder.glob(f"{PRINTED}*")):
            return True
        name = f"{PRINTED}{zlib.crc32(fault.kind.encode()):08x}"
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:  # a full disk
        return False
    return _was_printed_elsewhere(name)


def _was_printed_elsewhere(name: str) -> bool:
    """Return whether a rank on another node has printed it, if the ranks' store answers within STORE_SECONDS."""
    has_shown: list[bool] = []

    def ask() -> None:
        with suppress(Exception):  # no process group, or its store has exited
            store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
            has_shown.append(store.add(f"launch/{name}", 1) > 1)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return any(has_shown)


def fault_of(error: BaseException) -> Fault:
    """Describe an exception of this process."""
    described = traceback.TracebackException(type(error), error, None)
    described.__notes__ = None  # they would come last
    text = "".join([*described.format_exception_only()][-1:]).strip().partition("\n")[0]
    name = type(error).__name__
    if name == "ProcessRaisedException":
        text = (str(error).strip().splitlines() or [text])[-1]
    peer = isinstance(error, RuntimeError) and (
        name in ("DistNetworkError", "DistStoreError") or PEER.search(str(error)) is not None
    )
    transient = peer or name in ("DistBackendError", *OF_OTHERS)
    for cause in _chain(error):
        is_passing = isinstance(cause, OSError) and not isinstance(cause, LASTING)
        transient = transient or is_passing or TRANSIENT.search(str(cause)) is not None
    rank = os.environ.get("RANK", "")
    return Fault(
        error=text[:MAX_TEXT],
        place=_place(error),
        step=step,
        rank=int(rank) if rank.isdecimal() else None,
        pid=os.getpid(),
        peer=peer,
        transient=transient,
        permanent=not step and not transient and _is_unloadable(error),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _is_unloadable(error: BaseException) -> bool:
    """Return whether the code can't be loaded: a missing module, or a syntax error in a file of the user's."""
    if isinstance(error, SyntaxError):
        file = Path.cwd() / (error.filename or "<string>")
        return file.is_relative_to(_code()) and file.name == file.name.strip("<>")
    if not isinstance(error, ImportError) or NO_LIBRARY in str(error):
        return False
    native = str(error.path or "").endswith(".so")  # it may be incomplete: ranks share a cache of compiled files
    return not native and (error.name or "").partition(".")[0] not in DOWNLOADED


def _code() -> Path:
    return Path(os.environ.get(CODE) or Path.cwd())


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        frames = [(error.filename, error.lineno)]
    else:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    code = _code()
    mine = [(path.relative_to(code), line) for file, line in frames if (path := Path.cwd() / file).is_relative_to(code)]
    mine = [(path, line) for path, line in mine if "site-packages" not in path.parts]
    return next((f"{file}:{line}" for file, line in reversed(mine or frames)), "")


def record_step(done: int) -> None:
    """Note that this process has completed a step."""
    global step  # noqa: PLW0603 - of the process
    if step is None and (folder := _folder()):
        with suppress(OSError):
            (folder / STEPPED).touch()
    step = done


# --- On the node ------------------------------------------------------------------------------------------------------


def read_faults(folder: Path) -> Iterator[tuple[float, Fault]]:
    """Yield the faults of one generation with their Unix times. Unreadable files are skipped."""
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            yield file.stat().st_mtime, Fault(*json.loads(file.read_text()))


def fault_lines(recorded: Iterable[Fault]) -> Iterator[str]:
    """Yield one line for all ranks that failed alike. Peers' errors count only if nothing else is known."""
    alike: dict[str, list[Fault]] = {}
    for fault in sorted(recorded, key=lambda fault: fault.rank or 0):
        alike.setdefault(fault.kind, []).append(fault)
    for faults in alike.values():
        if not faults[0].peer or all(fault.peer for others in alike.values() for fault in others):
            rank = "" if faults[0].rank is None else f"rank {faults[0].rank} "
            who = f"{len(faults)} ranks failed" if len(faults) > 1 else f"{rank}failed"
            yield f"{who}: {faults[0]}"

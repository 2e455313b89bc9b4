"""torchrun, but for its last words: a failed worker is one line, not forty lines of torchrun's own traceback.

A user's error stands in the workers' output; what torchrun adds to it must not push it off the screen. Run as a script,
so that neither our package nor the user's folder is on its path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun


def main(argv: Sequence[str]) -> int:
    """Run torchrun; 0, the exit code of the first worker that failed (128 + a signal's number), or 128 + the signal
    that ended torchrun itself."""
    try:
        torchrun(list(argv))
    except ChildFailedError as error:
        first, failed = error.get_first_failure()
        for rank, failure in sorted(error.failures.items()):
            print(_line(rank, failure, first=rank == first), file=sys.stderr, flush=True)
        return failed.exitcode if failed.exitcode > 0 else 128 - failed.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _line(rank: int, failure: ProcessFailure, *, first: bool) -> str:
    """How one worker ended, with the traceback if it noted one (torch.distributed.elastic's `record`)."""
    how = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    noted: Any = failure.message  # declared as text, but what `record` wrote is an object
    traceback = noted.get("extraInfo", {}).get("py_callstack", "") if isinstance(noted, dict) else ""
    return f"train.node: rank {rank}: {how}{', the first to fail' if first else ''}\n{traceback}".rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

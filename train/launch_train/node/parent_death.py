"""Run a command that ends when its starter does: `python parent_death.py STARTER COMMAND...`.

The kernel sends SIGTERM to the command when the process STARTER has exited, also by SIGKILL, so that no torchrun trains
on a machine whose launch_train.node has died. torchrun passes the signal on to its workers. The setting survives exec
(prctl(2), PR_SET_PDEATHSIG). It imports little, and from the standard library only, as it runs at each start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(starter: int, command: list[str]) -> int:
    """Replace this process by `command`. Returns 127 with a one-line error if it can't be started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != starter:  # it exited before the prctl
        return 128 + signal.SIGTERM
    try:
        os.execvp(command[0], command)  # noqa: S606 — an argument list
    except OSError as error:
        print(f"launch: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

"""Runs a command that ends when its starter does: `python leash.py STARTER COMMAND...`.

The kernel sends SIGTERM to the command when the process STARTER is gone, kill -9 included, so that no torchrun
goes on training on a machine whose launch_train.node has died. torchrun hands the signal on to its workers. The setting
survives exec (prctl(2), PR_SET_PDEATHSIG). Standard library only, and as little of it as can be: it runs at each start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(starter: int, command: list[str]) -> int:
    """Become `command`; 127 with one line when it can't be started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != starter:  # it died before the kernel was told
        return 128 + signal.SIGTERM
    try:
        os.execvp(command[0], command)  # noqa: S606 — an argument list
    except OSError as error:
        print(f"launch: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

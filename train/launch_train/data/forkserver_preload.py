"""Preloaded by the fork server of the worker processes: imports what they all need, once.

The fork server leaves its rank's process group and ignores SIGTERM: a signal to the group or to all processes (Ctrl-C,
a preemption that torchrun or Slurm tells) must not stop the data of a rank that still has steps to do. The fork server
exits when its rank does.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import launch_train.data.images
import launch_train.data.user_dataset
import launch_train.data.workers  # noqa: F401 - imported for the workers

if sys.argv[:1] == ["-c"] and "multiprocessing.forkserver" in sys.modules:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):
        os.setpgid(0, 0)

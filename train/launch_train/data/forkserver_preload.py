"""Preloaded by the fork server of the worker processes: imports what they all need, once.

The fork server leaves its rank's process group: a signal to the group (Ctrl-C, a preemption that torchrun forwards)
must not stop the data of a rank that still has steps to do. The fork server exits when its rank does.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import launch_train.data.images
import launch_train.data.user_dataset
import launch_train.data.workers  # noqa: F401 - imported for the workers

if sys.argv[:1] == ["-c"] and "multiprocessing.forkserver" in sys.modules:
    with suppress(OSError):
        os.setpgid(0, 0)

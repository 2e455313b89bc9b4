"""Loaded by the process that loader processes are forked from: what they all need, once.

It leaves the process group of its rank: a signal to that group (Ctrl-C, a preemption that torchrun passes on) must not
take the data from a rank that still has steps to do. Without its rank it ends by itself.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import launch_train.data.images
import launch_train.data.user_dataset
import launch_train.data.workers  # noqa: F401

if sys.argv[:1] == ["-c"] and "multiprocessing.forkserver" in sys.modules:
    with suppress(OSError):
        os.setpgid(0, 0)

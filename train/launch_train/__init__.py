"""The package in the container: the node agent (`launch_train.node`), the built-in trainer and the API for scripts.

A custom torch script needs five lines of it (docs/scripts.md):

    import launch_train
    run = launch_train.init(seed=7)
    run.state.update(model=model, optimizer=optimizer)
    for step in run.steps(1000):
        run.log(step, loss=loss.item())

Importing it is cheap: torch is imported by `init`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch_train.script import ScriptRun

__all__ = ["init"]

PACKAGES = "/opt/launch/packages"
"""Packages that launch adds to an image which it did not build from its own recipe (docs/images.md). They come last on
the path, so that the image's own versions win."""

if os.path.isdir(PACKAGES) and PACKAGES not in sys.path:  # noqa: PTH112 - pathlib would cost milliseconds in each process
    sys.path.append(PACKAGES)


def init(seed: int = 0) -> ScriptRun:
    """Select this process's device, join the process group if torchrun started it, and seed Python, NumPy and torch.

    Works alone, under torchrun, and in a job. Call it before the model is created: all ranks then create the same one.
    A process group that the script has already joined is used. Without a run folder nothing is saved or logged.

    The process exits with a one-line error and its exit code if torch is missing, if torchrun's variables are
    incomplete, or if the node has GPUs that torch can't use.
    """
    from launch_train import script

    return script.init(seed)

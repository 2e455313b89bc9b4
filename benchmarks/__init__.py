"""Benchmarks, one per module: for example `python -m benchmarks.startup`."""

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).resolve().parent.parent / "train")
)  # launch_train, on a GPU machine without an install

"""Print the output of a run's replicas."""

from __future__ import annotations

import sys
import threading

from launcher.diagnosis.output_cause import CauseFinder


class LinePrinter(CauseFinder):
    """Prints lines of all replicas to stderr with the replica's name as prefix, and finds the cause of a failure."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        self._lock = threading.Lock()

    def __call__(self, replica: str, line: str) -> None:
        with self._lock:
            print(f"{self._prefix}[{replica}] {line}", file=sys.stderr, flush=True)
            self.add(replica, line)

"""The lines of a rehearsal's replicas, and the error among them."""

from __future__ import annotations

import re
import sys
import threading

ERROR = re.compile(r"(\[rank\d+\]: )?(?P<error>[A-Za-z_][\w.]*(Error|Exception)(:.*)?)$")
"""The last line of a Python traceback; torch writes the rank in front once the processes have joined."""

REASON = re.compile(r"train\.node: (?P<reason>.+) \(exit code [1-9]\d*\)$")
"""The last words of a node that has not ended well."""


class LinePrinter:
    """Prints whole lines of all replicas on stderr, each with its replica's name in front.

    `error` is the first line since the newest start that ends a Python traceback: with several processes the cause
    stands above the complaints of those that waited for the one that failed. `reason` is what a node said at its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error = ""
        self.reason = ""

    def __call__(self, replica: str, line: str) -> None:
        with self._lock:
            print(f"[{replica}] {line}", file=sys.stderr, flush=True)
            if line.startswith("train.node: ") and "; starting again (" in line:
                self.error = ""
            elif not self.error and (found := ERROR.match(line)):
                self.error = f"[{replica}] {found['error']}"
            if not self.reason and (found := REASON.match(line)):
                self.reason = found["reason"]

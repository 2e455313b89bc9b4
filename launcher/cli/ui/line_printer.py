"""The lines of a run's replicas, and the cause of its end among them."""

from __future__ import annotations

import re
import sys
import threading
from typing import NamedTuple

from launch_train.common.faults import PEER, explained

ERROR = re.compile(r"(\[rank\d+\]: )?(?P<text>[A-Za-z_][\w.]*(Error|Exception)(:.*)?)$")
"""The last line of a Python traceback; torch writes the rank in front once the processes have joined."""

WRAPPED = re.compile(r"Caught \w+ in (DataLoader worker|pin memory thread)")
"""What torch puts in front of an error of another process or thread, which follows: it says no more than where."""

TOLD = re.compile(r"train: (?P<text>.+)$")
"""The trainer's own words; the last ones before a deliberate end are its reason."""

NOTICE = re.compile(
    r"waits for a peer|the run goes on|is tried again|takes objects again|can't be removed|does not wait for them"
    r"|figures are written|is not looked at|no verdict: |no step was recorded|train: node \d+: (?!GPU \d+ is lost)"
    r"|train: warning: "
)
"""In words of the trainer's, or of the monitor's, that are about no end of its own."""

KILLED = re.compile(r"launch: (?P<text>rank \d+ failed \w+( \w+)?: (?P<signal>SIG\w+).*)$")
"""What train/launch_train/node/torchrun.py says of the first rank that failed, where a signal ended it."""

REASON = re.compile(r"launch: (?P<text>.+) \(exit code [1-9]\d*\)$")
"""The last words of a node that has not ended well."""

FAILED = re.compile(r"launch: (rank \d+ |\d+ ranks )?failed( alike)?: (?P<text>[A-Za-z_].*)$")
"""What a node says of an exception, whether or not its traceback was printed (train/launch_train/common/faults.py)."""

REFUSED = re.compile(r"\S+: error: (?P<text>.+)$")
"""The last line of argparse, before exit code 2."""

BY_ITSELF = "(its own lines say why)"
"""In a node's reason: the trainer ended on purpose (train/launch_train/node/exit_status.py)."""

BARE = re.compile(r"node \d+: exit code \d+;")
"""A node's reason that names no more than the code."""


class Cause(NamedTuple):
    """Why it ended, in a replica's own words."""

    replica: str
    text: str

    def __str__(self) -> str:
        return f"[{self.replica}] {self.text}"


class LinePrinter:
    """Prints whole lines of all replicas on stderr, each with its replica's name in front, and finds the cause."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, Cause] = {}
        self.restarts = 0
        """How often the nodes have started their processes again."""

    def reset(self) -> None:
        """Another start: what was said of the one before explains nothing."""
        self._seen = {}

    @property
    def cause(self) -> Cause | None:
        """What the lines since the newest start name as the reason of a bad end; None where they name none.

        With several processes the first error is the cause, and what follows are complaints of those that waited for
        the one that failed: some of these come even before it, and count only where nothing else is known.
        """
        seen = self._seen
        reason = seen.get("reason")
        if reason and BY_ITSELF in reason.text and (own := seen.get("told") or seen.get("refused")):
            return own
        known = [seen[kind] for kind in ("killed", "error", "failed", "told", "aborted") if kind in seen]
        if known:
            return known[0]
        return seen.get("peer") if reason is None or BARE.match(reason.text) else reason

    def __call__(self, replica: str, line: str) -> None:
        with self._lock:
            print(f"[{replica}] {line}", file=sys.stderr, flush=True)
            if line.startswith("launch: ") and "; starting again (" in line:
                self.restarts += 1
                self.reset()
            else:
                self._note(replica, line)

    def _note(self, replica: str, line: str) -> None:
        if WRAPPED.search(line):
            return
        if found := ERROR.match(line):
            kind = "peer" if PEER.search(line) else "error"
        elif (found := TOLD.match(line)) and not NOTICE.search(line):
            self._seen.pop("told", None)  # the last one counts
            kind = "told"
        elif found := KILLED.match(line):  # an abort may be no more than the end of a process that has said its error
            kind = "aborted" if found["signal"] == "SIGABRT" else "killed"
        elif found := FAILED.match(line):
            kind = "peer" if PEER.search(line) else "failed"
        elif found := REASON.match(line):
            kind = "reason"
        elif found := REFUSED.match(line):
            kind = "refused"
        else:
            return
        self._seen.setdefault(kind, Cause(replica, explained(found["text"])))

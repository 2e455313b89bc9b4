"""Find the cause of a failure in the output of a job's replicas."""

from __future__ import annotations

import re
from typing import NamedTuple

from launch_train.common.faults import PEER, with_gpu_hint

ERROR = re.compile(r"(\[rank\d+\]: )?(?P<text>[A-Za-z_][\w.]*(Error|Exception)(:.*)?)$")
"""The last line of a Python traceback; torch prefixes the rank once the process group exists."""

WRAPPED = re.compile(r"Caught \w+ in (DataLoader worker|pin memory thread)")
"""torch's header before the traceback of another process or thread."""

TRAINER = re.compile(r"train: (?P<text>.+)$")
"""The trainer's messages; the last one before a deliberate end is its reason."""

NOTICE = re.compile(
    r"exits: another rank has failed|training continues|can't be removed|does not wait for them"
    r"|no verdict: |no step was recorded|train: node \d+: (?!GPU \d+ is lost)"
    r"|train: warning: "
)
"""Messages of the trainer or the monitor that are not the reason of an end."""

KILLED = re.compile(r"launch: (?P<text>rank \d+ failed \w+( \w+)?: (?P<signal>SIG\w+).*)$")
"""A message about the first failed rank if a signal killed it (train/launch_train/node/torchrun_wrapper.py)."""

REASON = re.compile(r"launch: (?P<text>.+) \(exit code [1-9]\d*\)$")
"""The last message of a node that failed."""

FAILED = re.compile(r"launch: (rank \d+ |\d+ ranks )?failed( alike)?: (?P<text>[A-Za-z_].*)$")
"""A node's message about an exception, with or without its traceback (train/launch_train/common/faults.py)."""

REFUSED = re.compile(r"\S+: error: (?P<text>.+)$")
"""The last line of argparse, before exit code 2."""

BY_ITSELF = re.compile(r"see the error above|\(its own lines say why\)")
"""In a node's reason: the trainer exited deliberately and said why (train/launch_train/node/exit_status.py)."""

RESTART = re.compile(r"launch: .*; restarting \(")
"""A node's message about a restart."""

BARE = re.compile(r"node \d+: exit code \d+;")
"""A node's reason that names only the exit code."""


class Cause(NamedTuple):
    """The cause of an end: a replica and its message."""

    replica: str
    text: str

    def __str__(self) -> str:
        return f"[{self.replica}] {self.text}"


class CauseFinder:
    """Finds the cause of a failure in lines of all replicas."""

    def __init__(self) -> None:
        self._seen: dict[str, Cause] = {}
        self.restarts = 0
        """How often the nodes restarted their processes."""

    def reset(self) -> None:
        """Forget the messages of the last start."""
        self._seen = {}

    @property
    def cause(self) -> Cause | None:
        """Return the cause of a failure since the last start, or None.

        With several processes the first error is the cause. Errors of processes that lost their peer may even come
        before it; they count only if nothing else is known.
        """
        seen = self._seen
        reason = seen.get("reason")
        if reason and BY_ITSELF.search(reason.text) and (own := seen.get("trainer") or seen.get("refused")):
            return own
        known = [seen[kind] for kind in ("killed", "error", "failed", "trainer", "aborted") if kind in seen]
        if known:
            return known[0]
        return seen.get("peer") if reason is None or BARE.match(reason.text) else reason

    def add(self, replica: str, line: str) -> None:
        if RESTART.match(line):
            self.restarts += 1
            self.reset()
        else:
            self._note(replica, line)

    def _note(self, replica: str, line: str) -> None:
        if WRAPPED.search(line):
            return
        if match := ERROR.match(line):
            kind = "peer" if PEER.search(line) else "error"
        elif (match := TRAINER.match(line)) and not NOTICE.search(line):
            self._seen.pop("trainer", None)  # the last message counts
            kind = "trainer"
        elif match := KILLED.match(line):  # an abort often follows a printed error
            kind = "aborted" if match["signal"] == "SIGABRT" else "killed"
        elif match := FAILED.match(line):
            kind = "peer" if PEER.search(line) else "failed"
        elif match := REASON.match(line):
            kind = "reason"
        elif match := REFUSED.match(line):
            kind = "refused"
        else:
            return
        self._seen.setdefault(kind, Cause(replica, with_gpu_hint(match["text"])))

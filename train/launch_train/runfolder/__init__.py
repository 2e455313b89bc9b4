"""The run folder: the names of its files, and the JSON lines in them.

Launcher, node, trainer and report know a run folder by this package alone: `run` reads the whole of a run, `starts` the
rows and events of its processes. Standard library only: the launcher imports it to plan, and the node before it knows
that torch works.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from launch_train.common.storage import Storage

PLAN: Final = "plan.json"
SPEC: Final = "spec.yaml"
REPORT: Final = "report.html"
PAGE_MARK: Final = '<meta name="generator" content="launch">'
"""In the head of each page that launch writes, so that a page in a code folder is not taken for code."""

TERMINAL: Final = "terminal"
"""The reason why this run must not be started again. While it exists, every restarted container exits at once."""

PROGRESS: Final = "progress.json"
"""The newest row of the metrics (JSON: attempt, steps, row), replaced now and then: a list of runs reads nothing else.
Only in a bucket."""

METRICS: Final = "metrics"
MONITOR: Final = "monitor"
CHECKPOINTS: Final = "checkpoints"
LOGS: Final = "logs"
TEXT: Final = "text"
PROFILE: Final = "profile"
ATTEMPTS: Final = "attempts"
NODES: Final = "nodes"
LATEST: Final = "checkpoints/LATEST"
"""The newest checkpoint, and the one start of the run that may write more (JSON; changed by compare-and-swap)."""


def metrics_part(attempt: int, generation: int, node: int, part: int) -> str:
    """Return the name of one create-only part of the metrics: JSON lines, written by rank 0 of the node.

    Zero-padded, so that the names sort in the order of writing.
    """
    return f"{METRICS}/{attempt:04d}-{generation:04d}-{node:04d}-{part:06d}.jsonl"


def monitor_part(attempt: int, generation: int, node: int, part: int) -> str:
    """Return the name of one create-only part of a node's monitoring data: JSON lines
    (train/launch_train/monitoring/monitor.py)."""
    return f"{MONITOR}/{attempt:04d}-{generation:04d}-{node:04d}-{part:06d}.jsonl"


class Part(NamedTuple):
    """The name of one part of the metrics or of the samples of a machine. `attempt` counts from 1, `generation`, `node`
    and `part` from 0; `variant`: not 0 where that name had been taken."""

    attempt: int
    generation: int
    node: int
    part: int
    variant: int = 0

    @classmethod
    def of(cls, name: str) -> Part | None:
        """Parse a name in a run folder; None: it is no such part."""
        match = _PART.match(name)
        return cls(*map(int, match.groups("0"))) if match else None


_PART: Final = re.compile(rf"^(?:{METRICS}|{MONITOR})/(\d+)-(\d+)-(\d+)-(\d+)(?:-(\d+))?\.jsonl$")


def parts_in_order(names: Iterable[str]) -> list[tuple[Part, str]]:
    """Return the parts among the names of a run folder in the order in which they were written: by number, as the
    10,000th generation is newer than the second."""
    return sorted((part, name) for name in names if (part := Part.of(name)))


def records(text: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a part; skip malformed lines (a crash may cut one off).

    A value that is nan or infinite (a script may write its own rows) becomes None, with its text under `nonfinite`.
    """
    lines = text.splitlines()
    decoded: list[dict[str, Any]]
    try:
        decoded = _decoder()(b"[%b]" % b",".join(lines))
    except (ValueError, RecursionError):
        decoded = []
    if len(decoded) == len(lines) and {*map(type, decoded)} <= {dict}:
        return decoded
    return [record for line in lines if isinstance(record := _parsed_record(line), dict)]


@cache
def _decoder() -> Callable[[bytes], Any]:
    try:  # launch has msgspec, which is twice as fast; a training image may not
        from msgspec.json import decode
    except ImportError:
        return partial(json.loads, parse_constant=int)  # raises ValueError for NaN and Infinity, as msgspec does
    return decode


def _parsed_record(line: bytes) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    values = record.items() if isinstance(record, dict) else ()
    if lost := {name: str(value) for name, value in values if isinstance(value, float) and not math.isfinite(value)}:
        record |= {**dict.fromkeys(lost), "nonfinite": {**nonfinite(record), **lost}}
    return record


def text_part(attempt: int, node: int, part: int) -> str:
    """Return the name of one create-only part of the output of a node and its processes."""
    return f"{TEXT}/{attempt:04d}-{node:04d}-{part:06d}.log"


TEXT_PART: Final = re.compile(rf"^{TEXT}/(\d+)-(\d+)-(\d+)(?:-(\d+))?\.log\Z")
"""Matches the parts of the output: attempt, node, part, and a variant where that name had been taken."""


def next_part(storage: Storage, first: str) -> int:
    """Return the number of the next part to write, after those that the folder has. `first` is the name of part 0.
    Raises OutputError."""
    prefix = first.rpartition("-")[0] + "-"
    numbers = (re.match(r"\d+", name.removeprefix(prefix)) for name in storage.list(prefix))
    return max((int(number[0]) + 1 for number in numbers if number), default=0)


def start_name(attempt: int, generation: int) -> str:
    """Return the name of one start of the processes: the sub-folder of a step in which it writes its checkpoint."""
    return f"{attempt:04d}-{generation:04d}"


def checkpoint_folder(step: int, start: str) -> str:
    """Return the folder in which one start of the run writes the checkpoint of a step (from 1)."""
    return f"{CHECKPOINTS}/step-{step:08d}/{start}"


def manifest(step: int, start: str) -> str:
    """Return the name of a checkpoint's manifest: it is written last, and makes the checkpoint valid."""
    return f"{checkpoint_folder(step, start)}/manifest.json"


def checkpoint_steps(names: Iterable[str]) -> list[int]:
    """Return the steps of the complete checkpoints among the names of a run folder."""
    return [int(match["step"]) for match in map(MANIFEST.match, names) if match]


MANIFEST: Final = re.compile(rf"^{CHECKPOINTS}/step-(?P<step>\d{{8,}})/(?P<start>\d{{4,}}-\d{{4,}})/manifest\.json$")
"""Matches the manifests among the names of a run folder."""


def attempt_lock(attempt: int) -> str:
    """Return the name of the lock of one attempt (numbers start at 1)."""
    return f"{ATTEMPTS}/{attempt:04d}.json"


ATTEMPT_LOCK: Final = re.compile(rf"^{ATTEMPTS}/([0-9]{{4,18}})\.json\Z")
"""Matches the locks of attempts among the names of a run folder."""


def attempt_end(attempt: int) -> str:
    """Return the name of the record of how an attempt ended (JSON: exit_codes, seconds, time), written by its launcher
    if that was still running."""
    return f"{ATTEMPTS}/{attempt:04d}.end.json"


def attempt_cancel(attempt: int) -> str:
    """Return the name of the request to cancel an attempt of `launch local`: its launcher stops it (text)."""
    return f"{ATTEMPTS}/{attempt:04d}.cancel"


def attempt_job(attempt: int) -> str:
    """Return the name of the record of an attempt's job in the cloud (JSON: name, the resource's)."""
    return f"{ATTEMPTS}/{attempt:04d}.job"


def attempt_verdict(attempt: int) -> str:
    """Return the name of the record of how an attempt in the cloud ended, and why (JSON: state, kind, scope, cause,
    fix, time)."""
    return f"{ATTEMPTS}/{attempt:04d}.verdict.json"


NOTIFIED: Final = "notified"
COST: Final = "notified/cost.json"
"""What the run has cost so far (JSON: usd), as its node 0 estimates it. Only with `notify`."""


def notified(event: str) -> str:
    """Return the name of the record that an event was sent to the webhook (JSON: the message). Create-only."""
    return f"{NOTIFIED}/{re.sub('[^a-z0-9]+', '-', event).strip('-')}.json"


MOVED: Final = "attempts/moved.json"
"""Where the run has gone (JSON: to, time): it must not be started here again."""
INCOMPLETE: Final = "attempts/incomplete"
"""Exists while the run is being moved to this folder: from where."""


def closed_text(storage: Storage, names: Iterable[str]) -> str:
    """Return why a run must not be started in a folder with these names; empty: it may be. Raises OutputError."""
    if MOVED in names:
        to = next((str(record.get("to")) for record in records(storage.read(MOVED))), "another place")
        return f"the run was moved to {to}; continue it there"
    if INCOMPLETE in names:
        return f"the run is still being moved to {storage.url}; repeat launch move"
    return ""


NOW: Final = "attempts/now"
"""Written to learn the bucket's time."""


def claim(attempt: int) -> str:
    """Return the name of the claim of an attempt by a job (JSON: job): another job with the same attempt is a
    duplicate."""
    return f"{ATTEMPTS}/{attempt:04d}.claim"


CLAIM: Final = re.compile(rf"^{ATTEMPTS}/([0-9]{{4,18}})\.claim\Z")
"""Matches the claims of attempts among the names of a run folder."""


def generation_record(attempt: int) -> str:
    """Return the name of the file with the number of an attempt's newest generation: a replaced node 0 continues from
    there."""
    return f"{ATTEMPTS}/{attempt:04d}.generation"


def node_record(node: int) -> str:
    """Return the name of a node's facts at its start (JSON: host, GPUs, driver)."""
    return f"{NODES}/{node:04d}.json"


def node_bench(node: int) -> str:
    """Return the name of a node's benchmark before the run (JSON, as in BENCH)."""
    return f"{NODES}/{node:04d}.bench.json"


BENCH: Final = "bench.json"
"""The report of `launch_train.bench`, if that was the run (JSON: figures, ranks, findings, ok;
train/launch_train/bench/verdict.py)."""

MACHINES: Final = "machines"

WORK: Final = frozenset({METRICS, CHECKPOINTS, LOGS, PROFILE})
"""Names in a run folder below which only a running program's results are."""
OWN_NAMES: Final = frozenset(
    {
        *(*WORK, MONITOR, TEXT, ATTEMPTS, NODES, MACHINES, PLAN, SPEC, REPORT, TERMINAL, BENCH, PROGRESS, NOTIFIED),
        *("stacks", "wandb", "workdirs"),
    }
)
"""Names of the files and folders that launch creates directly in a run folder."""
NO_STEP: Final = "no_step"
"""The event of a program that exited with 0 soon, and left neither a row nor another result; `seconds`: after how
many."""


def stacks(attempt: int, generation: int, node: int) -> str:
    """Return the name of the file with the stacks of a node's hung processes (text)."""
    return f"stacks/{attempt:04d}-{generation:04d}-{node:04d}.txt"


def collectives(attempt: int, generation: int, rank: int) -> str:
    """Return the name of a hung rank's dump of NCCL's flight recorder (a pickle, which torchfrtrace reads)."""
    return f"stacks/{attempt:04d}-{generation:04d}-nccl-{rank}"


def machine_end(instance: str) -> str:
    """Return the name of the record of how a VM of the run ended, by its numeric id in Compute Engine (JSON: exit,
    reason, name, zone, started, ended; times in Unix seconds). Create-only: written by the VM's startup script, or by
    whoever cancels the run first."""
    return f"{MACHINES}/{instance}.json"


def nonfinite(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a metrics row that were nan, inf or -inf. A script may log a value called nonfinite."""
    texts = row.get("nonfinite")
    items = texts.items() if isinstance(texts, Mapping) else ()
    return {name: text for name, text in items if text in ("nan", "inf", "-inf")}


def figure(record: Mapping[str, Any], name: str) -> float | int | None:
    """Return a record's number of that name, including nan and infinities; None if it has none."""
    value = record.get(name)
    if value is None and (text := nonfinite(record).get(name)):
        return float(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None

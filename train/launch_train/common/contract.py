"""What launch and the training processes agree upon: environment, run folder, exit codes.

The launcher writes these names into the request; the node and the trainer read them. Standard library only, because
the launcher imports it to plan (nothing heavy may load) and the node imports it before it knows that torch works.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

# --- The environment that the request carries -------------------------------------------------------------------

RUN: Final = "LAUNCH_RUN"
"""The run id, `<name>-<8 hex>`."""

RUN_FOLDER: Final = "LAUNCH_RUN_FOLDER"
"""Where the run writes, `<output>/<run>`: gs://… or a local folder. Without a trailing slash."""

CONFIG: Final = "LAUNCH_CONFIG"
"""`run.config` of the spec, as JSON. In the request `$(` is written `$$(`, which the platform turns back."""

PROCESSES: Final = "LAUNCH_PROCESSES"
"""Processes on each node: as many as it has GPUs. Left out: the GPUs that are visible, else 1."""

RESTARTS: Final = "LAUNCH_RESTARTS"
"""How often the node starts failed processes again without a new durable step in between (3 when left out)."""
DEFAULT_RESTARTS: Final = 3

HOURS: Final = "LAUNCH_HOURS"
"""The run's budget of billed time, in hours, over all attempts."""

GPU: Final = "LAUNCH_GPU"
"""JSON about the GPU that was asked for: {"name", "memory_gb", "min_driver", "peak_tflops": {"bf16": …, …}}.
Facts that the trainer needs travel in the request, so that train needs no catalog. A null means unknown."""

MTBF: Final = "LAUNCH_MTBF_HOURS"
"""Hours between two interruptions of the whole run (preemptions, broken machines) that launch expects of its machines.
The trainer's checkpoint interval comes from it."""

PREFLIGHT: Final = "LAUNCH_PREFLIGHT"
"""`bench`: each node measures its GPUs before it starts anything, and is unfit if they are far too slow."""

SECRETS: Final = "LAUNCH_SECRETS"
"""JSON: environment variable -> Secret Manager version, read on the node; never a value."""

HANG_AFTER: Final = "LAUNCH_HANG_AFTER"
"""Seconds without a row of metrics or a line of output after which a script or command counts as hung; unset: never.
The built-in trainer has its own setting for it, in CONFIG."""

ENDED: Final = "LAUNCH_ENDED"
"""JSON: the ids of the run's jobs that had ended when this one was made. Only in the request of a launch that could
write no lock for it, or that knows of such jobs: their claims (`claim`) hold no more."""

NCCL_SCRIPT: Final = "LAUNCH_NCCL_SCRIPT"
"""A shell script of the machine's image that sets NCCL up for its network; the node sources it if it is there."""

MACHINE: Final = "LAUNCH_MACHINE"
"""JSON about the Compute Engine VM that this node is: {"project", "zone", "name", "instance"}, the last its number. Set
by the VM's startup script, and nowhere else: with it the node watches the metadata server for the VM's end, and writes
what is printed to Cloud Logging, which on Vertex AI the platform does."""

LIBRARY_PATH: Final = "LAUNCH_LIBRARY_PATH"
"""Folders (colon-separated) that go in front of LD_LIBRARY_PATH: the machine's own NCCL network plugin."""

RESERVED_PREFIXES: Final = ("LAUNCH_", "AIP_", "TORCHELASTIC_")
RESERVED: Final = frozenset(
    {
        *("CLUSTER_SPEC", "TF_CONFIG", "CLOUD_ML_JOB_ID", "PYTHONSAFEPATH", "PYTHONPATH"),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Names that a spec's `env` may not set: the platform, launch or torchrun does."""

# --- The environment that the platform sets -----------------------------------------------------------------------

CLUSTER_SPEC: Final = "CLUSTER_SPEC"
JOB_ID: Final = "CLOUD_ML_JOB_ID"
TENSORBOARD_DIR: Final = "AIP_TENSORBOARD_LOG_DIR"

# --- The environment that the node sets for the processes it starts -----------------------------------------------

ATTEMPT: Final = "LAUNCH_ATTEMPT"
GENERATION: Final = "LAUNCH_GENERATION"
NODE: Final = "LAUNCH_NODE"
"""Numbers, from 1 (attempt) and 0 (generation, node): they name the parts that a process writes."""

VISIBLE_GPUS: Final = "LAUNCH_VISIBLE_GPUS"
"""How many GPUs the node sees. A trainer that can't use them must not train on the CPU instead."""

CODE: Final = "LAUNCH_CODE"
"""The user's code: the folder that the node was started in. Its modules come after Python's own and after those beside
the script (train/launch_train/node/sitecustomize/sitecustomize.py)."""

EXIT_FILE: Final = "LAUNCH_EXIT_FILE"
"""A file to which a process that ends deliberately appends its exit code (`Exit`) as a line: torchrun exits 1 whatever
its workers say. A 0 means that the work was done."""

NOTICE: Final = "LAUNCH_NOTICE"
"""A file that is there once this machine was told to stop; it holds the Unix time of that. With it SIGTERM means
"save and leave"; without it a peer has failed and the others are ended: nothing can be agreed any more."""

WATCH: Final = "LAUNCH_WATCH"
"""A folder for hang detection. `heartbeat` holds the deadline of the next heartbeat
(train/launch_train/common/heartbeat.py). Every Python process writes its stacks to a file named after its process id
when the node requests them (train/launch_train/node/sitecustomize/sitecustomize.py)."""

FAULTS: Final = "LAUNCH_FAULTS"
"""A folder in which processes record what they failed with (train/launch_train/common/faults.py)."""

SPOOL: Final = "LAUNCH_SPOOL"
"""A folder on the node's own disk for what has not reached the run folder yet. The node sends what a dead process left
there."""

# --- What a VM's node writes to Cloud Logging ------------------------------------------------------------------------

LOG: Final = "launch"
"""The log's id: projects/PROJECT/logs/launch, of the resource gce_instance."""
LOG_RUN: Final = "launch-run"
"""The label of an entry that holds the run's id."""
LOG_TASK: Final = "task_name"
"""The label that says which node it was, in Vertex AI's words (`task_name`)."""


def task_name(node: int) -> str:
    """A node as Vertex AI calls it: the first is the only one of the first pool, the others are the second's."""
    return f"workerpool1-{node - 1}" if node else "workerpool0-0"


# --- The run folder -------------------------------------------------------------------------------------------------

PLAN: Final = "plan.json"
SPEC: Final = "spec.yaml"
REPORT: Final = "report.html"
TERMINAL: Final = "terminal"
"""Why this run must not be started again. Under it every restarted container exits at once."""

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
    """Name of one create-only part of the metrics: JSON lines, written by rank 0 of the node.

    Zero-padded, so that the names sort in the order in which they were written.
    """
    return f"{METRICS}/{attempt:04d}-{generation:04d}-{node:04d}-{part:06d}.jsonl"


def monitor_part(attempt: int, generation: int, node: int, part: int) -> str:
    """Name of one create-only part of what a node saw of its machine: JSON lines
    (train/launch_train/monitoring/monitor.py)."""
    return f"{MONITOR}/{attempt:04d}-{generation:04d}-{node:04d}-{part:06d}.jsonl"


def text_part(attempt: int, node: int, part: int) -> str:
    """Name of one create-only part of what a node and its processes printed."""
    return f"{TEXT}/{attempt:04d}-{node:04d}-{part:06d}.log"


def start_name(attempt: int, generation: int) -> str:
    """One start of the processes: the sub-folder of a step in which it writes its checkpoint."""
    return f"{attempt:04d}-{generation:04d}"


def checkpoint_folder(step: int, start: str) -> str:
    """Where one start of the run keeps the checkpoint of a step (from 1)."""
    return f"{CHECKPOINTS}/step-{step:08d}/{start}"


def manifest(step: int, start: str) -> str:
    """Name of the file whose being there makes a checkpoint one: it is written last."""
    return f"{checkpoint_folder(step, start)}/manifest.json"


MANIFEST: Final = re.compile(rf"^{CHECKPOINTS}/step-(?P<step>\d{{8,}})/(?P<start>\d{{4,}}-\d{{4,}})/manifest\.json$")
"""What the manifests among the names of a run folder look like."""


def attempt_lock(attempt: int) -> str:
    """Name of the lock of one attempt (numbers start at 1)."""
    return f"{ATTEMPTS}/{attempt:04d}.json"


def attempt_end(attempt: int) -> str:
    """Name of how an attempt ended (JSON: exit_codes, seconds, time), where whoever started it was there to see it."""
    return f"{ATTEMPTS}/{attempt:04d}.end.json"


def attempt_job(attempt: int) -> str:
    """Name of the job that came of an attempt in the cloud (JSON: name, the resource's)."""
    return f"{ATTEMPTS}/{attempt:04d}.job"


def attempt_verdict(attempt: int) -> str:
    """Name of how an attempt in the cloud ended, and what that means (JSON: state, kind, scope, cause, fix, time)."""
    return f"{ATTEMPTS}/{attempt:04d}.verdict.json"


NOW: Final = "attempts/now"
"""Written to ask the bucket what time it is."""


def claim(attempt: int) -> str:
    """Name of the job id (JSON: job) that has taken an attempt: another job with the same attempt is a duplicate."""
    return f"{ATTEMPTS}/{attempt:04d}.claim"


def generation_record(attempt: int) -> str:
    """Name of the number of the newest generation of an attempt: a replaced node 0 goes on from there."""
    return f"{ATTEMPTS}/{attempt:04d}.generation"


def node_record(node: int) -> str:
    """Name of what a node says of itself at its start (JSON: host, GPUs, driver)."""
    return f"{NODES}/{node:04d}.json"


def node_bench(node: int) -> str:
    """Name of what a node's GPUs gave before it started anything (JSON, as in BENCH)."""
    return f"{NODES}/{node:04d}.bench.json"


BENCH: Final = "bench.json"
"""What `launch_train.bench` measured, where it was the run (JSON: figures, ranks, findings, ok;
train/launch_train/bench/report.py)."""

MACHINES: Final = "machines"


def stacks(attempt: int, generation: int, node: int) -> str:
    """Return the name of the file with the stacks of a node's hung processes (text)."""
    return f"stacks/{attempt:04d}-{generation:04d}-{node:04d}.txt"


def machine_end(instance: str) -> str:
    """Name of how a VM of the run ended, by its number in Compute Engine (JSON: exit, reason, name, zone, started,
    ended; times in Unix seconds). Create-only: its own startup script writes it, or whoever cancels the run first."""
    return f"{MACHINES}/{instance}.json"


def nonfinite(row: Mapping[str, Any]) -> dict[str, str]:
    """The values of a metrics row that were nan, inf or -inf. Rows of an earlier version only name them, and a user may
    log a value of this name."""
    found = row.get("nonfinite")
    if isinstance(found, list):
        return {name: "nan" for name in found if isinstance(name, str)}
    items = found.items() if isinstance(found, Mapping) else ()
    return {name: text for name, text in items if text in ("nan", "inf", "-inf")}


MEAN_STEPS: Final = 10
"""The event `end` has the mean loss of at most so many steps (`train_loss_steps`), the first (`train_loss_first`) and
the last ones."""


# --- Exit codes -----------------------------------------------------------------------------------------------------


class Exit(IntEnum):
    """What a node's exit code means. Preempted is never 0: a platform must not take it for success."""

    OK = 0
    FAILED = 1
    """A process failed more often than `restarts` allows."""
    USAGE = 2
    """The config or the code to run can't work; starting it again can't help. Writes `terminal`."""
    UNFIT = 70
    """The machine is not fit: no GPU, an old driver, no shared memory, an output that can't be written."""
    PREEMPTED = 75
    """Stopped from outside after saving; another start goes on from there."""
    DISAGREED = 76
    """The ranks' parameters or moments differ: the result must not be trusted."""
    SUPERSEDED = 77
    """Another start of the same run has taken over; this one left the run folder to it."""
    TERMINAL = 78
    """The run folder says that this run must not be started again."""

"""The contract between launcher and training processes: environment, grace periods, exit codes.

The launcher writes these names into the request; the node and the trainer read them. Standard library only: the
launcher imports it to plan (nothing heavy may load), and the node before it knows that torch works.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

# --- The environment that the request carries -------------------------------------------------------------------

RUN: Final = "LAUNCH_RUN"
"""The run id, `<name>-<8 hex>`."""

RUN_FOLDER: Final = "LAUNCH_RUN_FOLDER"
"""The run folder, `<output>/<run>`: gs://… or a local folder, without a trailing slash."""

CONFIG: Final = "LAUNCH_CONFIG"
"""`run.config` of the spec, as JSON. In the request `$(` is written `$$(`, which the platform reverts."""

PROCESSES: Final = "LAUNCH_PROCESSES"
"""Processes on each node. Default: one per visible GPU, or 1."""

RESTARTS: Final = "LAUNCH_RESTARTS"
"""Restarts of failed processes without a new checkpoint in between (default: 3)."""
DEFAULT_RESTARTS: Final = 3

HOURS: Final = "LAUNCH_HOURS"
"""The run's budget of billed time, in hours, over all attempts."""

GPU: Final = "LAUNCH_GPU"
"""JSON about the requested GPU: {"name", "memory_gb", "min_driver", "peak_tflops": {"bf16": …, …}}.

The facts that the trainer needs travel in the request, so that launch_train needs no catalog. null means unknown.
"""

MTBF: Final = "LAUNCH_MTBF_HOURS"
"""Expected hours between two interruptions of the whole run (preemptions, broken machines), by launch's estimate for
its machines. The trainer's checkpoint interval is derived from it."""

PREFLIGHT: Final = "LAUNCH_PREFLIGHT"
"""`bench`: each node benchmarks its GPUs before it starts anything, and is unfit if they are far too slow."""

SECRETS: Final = "LAUNCH_SECRETS"
"""JSON: environment variable -> Secret Manager version, which the node reads; never a value."""

SECRETS_FILE: Final = "LAUNCH_SECRETS_FILE"
"""On a host: the number of an open file without a name, in memory, from which the node reads the values instead (JSON:
environment variable, or notify.webhook -> value)."""

NOTIFY: Final = "LAUNCH_NOTIFY"
"""JSON: `notify` of the spec, and `usd`, its limits.usd (train/launch_train/node/notify.py). The processes of the run
don't get it, as a URL in it is a secret."""

HANG_AFTER: Final = "LAUNCH_HANG_AFTER"
"""Seconds without a row of metrics or a line of output after which a script or command counts as hung; unset: never.
The built-in trainer has its own setting for it, in CONFIG."""

SCRIPT_METRICS: Final = "LAUNCH_METRICS"
"""JSON: where a script's metrics come from without our API (`run.metrics` of the spec): {"regex", "tensorboard"}, each
optional (train/launch_train/node/collector.py). In the request `$(` is written as in CONFIG."""

RESUME: Final = "LAUNCH_RESUME"
"""JSON: how a script resumes from the checkpoints that it writes itself (`run.resume_glob` and `run.resume_args` of the
spec): {"glob", "args"} (train/launch_train/node/own_checkpoints.py)."""

LOGGERS: Final = "LAUNCH_LOGGERS"
"""Where a script's rows go besides the run folder (`run.loggers` of the spec): names of LOGGER_NAMES, separated by
commas; unset: DEFAULT_LOGGERS. The built-in trainer has its own setting for it, in CONFIG."""
LOGGER_NAMES: Final = ("tensorboard", "wandb", "mlflow", "vertex")
"""vertex: the job's TensorBoard instance on Vertex AI, which reads the event files that tensorboard writes."""
DEFAULT_LOGGERS: Final = ("tensorboard",)

GPU_MEMORY: Final = "LAUNCH_GPU_MEMORY_GB"
"""GPU memory that one process may use, in GB of 2**30 bytes (`machine.gpu_memory_gb`); unset: all of it."""

VERBATIM: Final = (CONFIG, SCRIPT_METRICS, NOTIFY)
"""Variables in which `$(NAME)` is not replaced: their text is the user's, but not written for the platform."""

ENDED: Final = "LAUNCH_ENDED"
"""JSON: the ids of the run's jobs that had ended when this one was created. Only in the request of a launcher that
could write no lock, or that knows of such jobs: their claims (`claim`) are void."""

NCCL_SCRIPT: Final = "LAUNCH_NCCL_SCRIPT"
"""A shell script in the machine's image that configures NCCL for its network; the node sources it if it exists."""

MACHINE: Final = "LAUNCH_MACHINE"
"""JSON about the Compute Engine VM of this node: {"project", "zone", "name", "instance"}, the last its numeric id.

Only the VM's startup script sets it. With it the node watches the metadata server for a preemption, and writes its
output to Cloud Logging, which on Vertex AI the platform does.
"""

LIBRARY_PATH: Final = "LAUNCH_LIBRARY_PATH"
"""Folders (colon-separated) to prepend to LD_LIBRARY_PATH: the machine's NCCL network plugin."""

PYTHON_PATH: Final = "LAUNCH_PYTHONPATH"
"""PYTHONPATH of the spec's `env`: folders (colon-separated), relative to the code's. The variable itself has the folder
of launch_train."""

RESERVED_PREFIXES: Final = ("LAUNCH_", "AIP_", "TORCHELASTIC_")
RESERVED: Final = frozenset(
    {
        *("CLUSTER_SPEC", "TF_CONFIG", "CLOUD_ML_JOB_ID", "PYTHONSAFEPATH"),
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Names that a spec's `env` may not set, because the platform, launch or torchrun sets them."""

PROJECT: Final = "LAUNCH_PROJECT"
"""The folder with what installing the code's projects would write (launcher/inputs/python_project.py): metadata, the
programs in bin/, and code.pth with the folders of their modules. Unset: PROJECT_FOLDER within this package."""
PROJECT_FOLDER: Final = "_project"

# --- The environment that the platform sets -----------------------------------------------------------------------

CLUSTER_SPEC: Final = "CLUSTER_SPEC"
JOB_ID: Final = "CLOUD_ML_JOB_ID"
TENSORBOARD_DIR: Final = "AIP_TENSORBOARD_LOG_DIR"
EVENT_FILES: Final = "*.tfevents.*"
"""Matches the names of TensorBoard's files."""

# --- Grace periods, in seconds from the SIGTERM of a platform ------------------------------------------------------

# They nest, so that no outer process kills an inner one that still reports. CONTAINER_SECONDS stands in
# launcher/services/compute/startup.sh too.

NOTICE_SECONDS: Final = 30.0
"""From SIGTERM to the end of the machine: Vertex AI, a Spot VM and `launch local`. A longer notice is known to the
node alone (train/launch_train/node/gce_vm.py), and moves the other limits as far."""

CONTAINER_SECONDS: Final = 28.0
"""The container is killed."""

NODE_SECONDS: Final = 25.0
"""The node kills its processes. It has the rest for its last uploads."""

TORCHRUN_SECONDS: Final = 23.0
"""torchrun kills the ranks."""

SAVE_SECONDS: Final = 21.0
"""A checkpoint must be durable."""

# --- The environment that the node sets for the processes it starts -----------------------------------------------

ATTEMPT: Final = "LAUNCH_ATTEMPT"
GENERATION: Final = "LAUNCH_GENERATION"
NODE: Final = "LAUNCH_NODE"
"""Numbers, from 1 (attempt) and 0 (generation, node). They name the parts that a process writes."""

RUN_PATH: Final = "LAUNCH_RUN_PATH"
"""The run folder as a path: of a bucket, /gcs/BUCKET/… if the machine has that folder. In the request's arguments and
variables the node replaces `$(LAUNCH_RUN_PATH)`, because the path depends on the machine."""

VISIBLE_GPUS: Final = "LAUNCH_VISIBLE_GPUS"
"""Number of GPUs that the node sees. A trainer that can't use them must not train on the CPU instead."""

CODE: Final = "LAUNCH_CODE"
"""The user's code: the folder in which the node was started. Its modules come after the standard library and after
those beside the script (train/launch_train/node/sitecustomize/sitecustomize.py)."""

CODE_PATH: Final = "LAUNCH_CODE_PATH"
"""Folders (colon-separated) that are imported from in place of CODE alone: those of the spec's PYTHONPATH, CODE, those
of the code's projects, and their metadata. Unset if CODE is the only one."""

EXIT_FILE: Final = "LAUNCH_EXIT_FILE"
"""A file to which a process that exits deliberately appends its exit code (`Exit`) as a line, because torchrun exits
with 1 whatever its workers do. A 0 means that the work is complete."""

NOTICE: Final = "LAUNCH_NOTICE"
"""A file that exists once this machine must stop: the Unix times of that request and of the machine's end. With it
SIGTERM means "save and exit"; without it a peer has failed, and nothing can be agreed any more."""

WATCH: Final = "LAUNCH_WATCH"
"""A folder for hang detection and signals. `heartbeat` holds the deadline of the next heartbeat
(train/launch_train/common/heartbeat.py). Every Python process writes its stacks to a file named after its process id
when the node requests them (train/launch_train/node/sitecustomize/sitecustomize.py). Processes that handle signals
register there (train/launch_train/common/signal_registry.py)."""

FAULTS: Final = "LAUNCH_FAULTS"
"""A folder in which processes record their uncaught exceptions (train/launch_train/common/faults.py)."""

SPOOL: Final = "LAUNCH_SPOOL"
"""A folder on the local disk for what has not reached the run folder yet. The node uploads what an exited process left
there."""

# --- What a VM's node writes to Cloud Logging ------------------------------------------------------------------------

LOG: Final = "launch"
"""The log's id: projects/PROJECT/logs/launch, of the resource gce_instance."""
LOG_RUN: Final = "launch-run"
"""Label of an entry with the run's id."""
LOG_TASK: Final = "task_name"
"""Label of an entry with the node's name, as on Vertex AI (`task_name`)."""


def task_name(node: int) -> str:
    """Return a node's name on Vertex AI: node 0 is the only replica of pool 0, the others are in pool 1."""
    return f"workerpool1-{node - 1}" if node else "workerpool0-0"


MEAN_STEPS: Final = 10
"""The event `end` has the mean loss of at most so many steps (`train_loss_steps`): the first (`train_loss_first`) and
the last ones."""


# --- Exit codes -----------------------------------------------------------------------------------------------------


class Exit(IntEnum):
    """Exit codes of a node. Preempted is never 0: a platform must not take it for success."""

    OK = 0
    FAILED = 1
    """The processes failed more often than `restarts` allows."""
    USAGE = 2
    """Invalid config or code: a restart can't help. Writes `terminal`."""
    UNFIT = 70
    """Unfit machine: no GPU, an old driver, no shared memory, an unwritable output."""
    PREEMPTED = 75
    """Interrupted after saving; the next start resumes from there."""
    DISAGREED = 76
    """The ranks' parameters or moments differ: the result must not be trusted."""
    SUPERSEDED = 77
    """Another start of the same run has taken over; this one no longer writes to the run folder."""
    TERMINAL = 78
    """The run folder forbids to start this run again."""

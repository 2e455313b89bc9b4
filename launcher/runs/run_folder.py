"""Read a run's folder: attempts, progress, nodes and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from launch_train import runfolder
from launch_train.runfolder.starts import read_metrics
from launcher.errors import LaunchError
from launcher.gcp.storage import open_folder, use_errors
from launcher.runs.metrics.gpu_nodes import read_nodes
from launcher.runs.metrics.progress import ProgressReader

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launch_train.runfolder.starts import RunMetrics
    from launcher.runs.attempts import AttemptEntry
    from launcher.runs.find import FoundRun
    from launcher.runs.metrics.gpu_nodes import Node
    from launcher.runs.metrics.progress import Progress

ANSWER_SECONDS = 20.0
"""Timeout of one request to the run's folder."""


class FolderSnapshot(NamedTuple):
    """The records in a run's folder. `problem` is why it could not be read completely; empty if it could."""

    attempts: tuple[AttemptEntry, ...] = ()
    progress: Progress | None = None
    nodes: tuple[Node, ...] = ()
    problem: str = ""


def read_run_folder(run: FoundRun) -> FolderSnapshot:
    """Read the attempts, progress and nodes from the folder of a run."""
    job, snapshot = run.job, FolderSnapshot()
    if not run.folder:
        return snapshot
    try:
        storage = open_folder(run.folder).within(ANSWER_SECONDS)
        snapshot = snapshot._replace(attempts=run.context.attempts(storage))
        number = next((entry.number for entry in reversed(snapshot.attempts) if entry.job == job.name), 1)
        snapshot = snapshot._replace(progress=ProgressReader(storage, job, attempt=number).read_new())
        return snapshot._replace(nodes=read_nodes(storage))
    except LaunchError as error:
        return snapshot._replace(problem=error.problem)


def open_run_folder(run: str, folder: str | None) -> Storage:
    """Open a run's folder. Raises LaunchError: the run has none, or it cannot be opened."""
    if not folder:
        raise LaunchError(f"{run} has no run folder, so nothing was stored", "Set output in the spec.")
    return open_folder(folder)


def storage_of(folder: str | None) -> Storage | None:
    """Open the run's folder; None if it cannot be opened."""
    try:
        return open_folder(folder) if folder else None
    except LaunchError:
        return None


def read_results(storage: Storage | None) -> RunMetrics | None:
    """Return the run's metrics, or None if it wrote none."""
    if storage is None:
        return None
    with use_errors():
        return read_metrics(storage)


def restarts(storage: Storage) -> int:
    """Return how often the nodes restarted the run's processes within its attempts."""
    with use_errors():
        names = storage.list(f"{runfolder.ATTEMPTS}/")
        texts = (storage.read(name).strip() for name in names if name.endswith(".generation"))
        return sum(int(text) for text in texts if text.isdigit())

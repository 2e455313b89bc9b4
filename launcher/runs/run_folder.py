"""Read a run's folder: attempts, progress, nodes and metrics."""

from __future__ import annotations

from launch_train import runfolder
from launch_train.common.storage import Storage
from launch_train.runfolder.starts import RunMetrics, read_metrics
from launcher.errors import LaunchError
from launcher.gcp.storage import open_folder, use_errors

ANSWER_SECONDS = 20.0
"""Timeout of one request to the run's folder."""


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

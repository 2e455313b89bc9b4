"""A run in MLflow, configured by MLflow's own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, …).

https://mlflow.org/docs/latest/api_reference/python_api/mlflow.environment_variables.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from launch_train.common.console import say
from launch_train.common.text import plural
from launch_train.loggers.feed import RefusedError, RunInfo, State, row_time
from launch_train.telemetry.rows import Row, scalars

RUN_TAG: Final = "launch.run"
"""Tag by which the next start finds the run."""
STEP_TAG: Final = "launch.{}_step"
"""Tag with the newest logged step of one kind of rows: train or eval."""

MOST_METRICS, MOST_PARAMS, MOST_CHARACTERS = 1000, 100, 6000
"""Limits of one request, and of a parameter's value (MLflow, REST API, runs/log-batch)."""
NOT_ALLOWED: Final = re.compile(r"[^\w\-. /]")
"""Characters that a name must not have."""

TIMEOUT: Final = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Defaults for what the spec does not set: this process retries failed requests itself."""

STATES: Final[Mapping[State, str]] = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}


class MlflowRun:
    """The run with launch's run id as a tag, so that every start of the run continues it."""

    def __init__(self, run: RunInfo) -> None:
        """Raises ImportError, and MLflow's errors."""
        for name, value in TIMEOUT.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ImportError("the image has no package mlflow; add mlflow-skinny to image.requirements") from error

        self._client = MlflowClient()
        stored_run = self._find(run)
        self._id: str = stored_run.info.run_id
        self._done = {group: int(stored_run.data.tags.get(STEP_TAG.format(group), -1)) for group in ("train", "eval")}
        self._before = dict(self._done)
        """The steps that earlier starts have logged, which a resumed run repeats."""
        self._params = set(stored_run.data.params)
        if run.spec:
            self.configure({"spec": run.spec})
        say(f"mlflow: run {self._id} at {re.sub('://[^/@]+@', '://', self._client.tracking_uri)}")

    def configure(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        flat = {NOT_ALLOWED.sub("_", name): value for name, value in _dotted_settings(config, "")}
        new = [Param(name, value[:MOST_CHARACTERS]) for name, value in flat.items() if name not in self._params]
        for at in range(0, len(new), MOST_PARAMS):  # MLflow refuses another value of a known one
            self._send(params=new[at : at + MOST_PARAMS])
            self._params.update(param.key for param in new[at : at + MOST_PARAMS])

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric, RunTag

        metrics, done = [], dict(self._done)
        for row in rows:
            group, step = str(row.get("event", "train")), row["step"]
            if step <= self._before[group]:
                continue
            done[group] = max(done[group], step)
            time = int(1000 * row_time(row))
            metrics += [Metric(NOT_ALLOWED.sub("_", name), value, time, step) for name, value in scalars(row).items()]
        tags = [RunTag(STEP_TAG.format(group), str(step)) for group, step in done.items() if step > self._done[group]]
        for at in range(0, len(metrics), MOST_METRICS):
            is_last = at + MOST_METRICS >= len(metrics)
            self._send(metrics=metrics[at : at + MOST_METRICS], tags=tags if is_last else ())
        self._done = done

    def finish(self, state: State) -> None:
        self._client.set_terminated(self._id, STATES[state])

    def _find(self, run: RunInfo) -> Any:
        """Return the run of an earlier start, or a new one."""
        if run_id := os.environ.get("MLFLOW_RUN_ID"):
            stored = self._client.get_run(run_id)
        else:
            experiment = self._experiment()
            runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
            if not runs:
                name = os.environ.get("MLFLOW_RUN_NAME") or run.id
                return self._client.create_run(experiment, run_name=name, tags={RUN_TAG: run.id})
            stored = runs[0]
        self._client.update_run(stored.info.run_id, status="RUNNING")
        return stored

    def _experiment(self) -> str:
        """Return the id of the experiment that the environment names; it is created if it does not exist."""
        if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return number
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _send(self, **batch: Any) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._id, synchronous=True, **batch)
        except MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                what = ", ".join(plural(len(items), kind.rstrip("s")) for kind, items in batch.items() if items)
                raise RefusedError(f"{what} refused: {error.message}") from error
            raise


def _dotted_settings(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _dotted_settings(item, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, str(value)

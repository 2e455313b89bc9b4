"""A run in Weights & Biases, configured by W&B's own environment variables (WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE).

https://docs.wandb.ai/models/track/environment-variables
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from launch_train.common.console import say
from launch_train.common.storage import open_storage
from launch_train.loggers.feed import RunInfo, State, row_time
from launch_train.telemetry.rows import Row, scalars
from launch_train.telemetry.upload_queue import open_outbox

UPLOAD_SECONDS: Final = 60.0
"""Time limit of uploading an offline run; the node uploads what is left on the disk."""

INIT_SECONDS: Final = 30.0
"""Time limit of opening the run, before the next try."""

EXIT_CODES: Final[Mapping[State, int]] = {"finished": 0, "failed": 1, "preempted": 1}


class WandbRun:
    """The run with launch's run id as its id, so that every start of the run continues it.

    W&B's steps only grow: an evaluation waits for the row of its step, and the steps that a resumed run repeats are
    left out, as W&B has them already.
    """

    def __init__(self, run: RunInfo) -> None:
        """Raises ImportError, and W&B's errors."""
        try:
            self._wandb: Any = import_module("wandb")
        except ImportError as error:
            raise ImportError("the image has no package wandb; add it to image.requirements") from error

        self._outbox = open_outbox(open_storage(run.folder), run.env)
        spool = self._outbox.folder
        self._folder = Path(tempfile.mkdtemp(prefix="launch-wandb-", dir=spool)) if spool else None
        """W&B's own files; None: they are in the run folder, which is local."""
        try:
            self._run = self._opened(run)
        except BaseException:
            self._outbox.close(0.0)
            raise
        self._is_offline = self._run.offline
        self._first = self._newest = self._run.step
        """The first step that W&B takes, and the newest one logged."""
        self._evaluations: dict[int, dict[str, float]] = {}
        say(f"wandb: {'offline run' if self._is_offline else self._run.url or 'run'} {self._run.id}")

    def _opened(self, run: RunInfo) -> Any:
        env = run.env
        # They would describe this process; launch's monitor samples the machine.
        unless_set = ("x_disable_stats", "x_disable_meta", "x_disable_machine_info")
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_save_requirements=False,
            init_timeout=INIT_SECONDS,
            **{name: True for name in unless_set if f"WANDB_{name.upper()}" not in env},
        )
        return self._wandb.init(
            id=env.get("WANDB_RUN_ID") or run.id,
            name=env.get("WANDB_NAME") or run.id,
            project=env.get("WANDB_PROJECT") or run.spec.get("name"),
            resume=env.get("WANDB_RESUME") or "allow",
            dir=env.get("WANDB_DIR") or self._folder or run.folder,
            config={"spec": dict(run.spec)} if run.spec else None,
            settings=settings,
        )

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            step, values = row["step"], scalars(row)
            if step < self._first:
                continue
            if "event" in row and step > self._newest:
                self._evaluations.setdefault(step, {}).update(values)
            else:
                self._log_evaluations(step - 1)
                self._log(step, {**self._evaluations.pop(step, {}), **values}, row_time(row))

    def finish(self, state: State) -> None:
        self._log_evaluations(None)
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(EXIT_CODES[state])
        self._wandb.teardown(EXIT_CODES[state])  # W&B's own process writes the rest of the file before it exits
        if self._folder:
            self._upload(self._folder)

    def _log_evaluations(self, until: int | None) -> None:
        """Log the evaluations up to a step for which no row arrived; None: all."""
        for step in sorted(self._evaluations):
            if until is None or step <= until:
                self._log(step, self._evaluations.pop(step), time.time())

    def _log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._newest = max(self._newest, step)
        self._run.log({**values, "_timestamp": at}, step=self._newest)

    def _upload(self, folder: Path) -> None:
        """Move the files of an offline run to wandb/ of the run folder, from where `wandb sync` takes them."""
        if self._is_offline:
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
                self._outbox.put_file(path.relative_to(folder).as_posix(), path)
        shutil.rmtree(folder, ignore_errors=True)
        self._outbox.close(UPLOAD_SECONDS)

"""Run a sweep on this machine: each point in a separate process, as `launch local` runs it, several in parallel.

The points run the code as it was when the sweep was planned, even if its files change in the meantime.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.common import contract
from launch_train.common.storage import LocalFolder, Storage
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.gcp.storage import open_folder, use_errors
from launcher.runs.local_run import run_planned
from launcher.runs.sweep.events import OnEvent, PointChanged, PointRun
from launcher.runs.sweep.plan import SweepPlan
from launcher.runs.sweep.record import mark_version, write_record
from launcher.services.local.attempts import End, newest_attempt, read_end, read_facts
from launcher.services.local.client import STOP_SECONDS, SupervisorHandle
from launcher.services.local.folder_lock import is_taken
from launcher.services.local.on_host import visible_gpus
from launcher.services.local.request import fingerprint, parse_request
from launcher.services.local.service import is_attempt_cancelled, request_cancel
from launcher.services.local.workdirs import Code, snapshot

TAKEN_SECONDS: Final = 2.0
"""Poll interval of a point that another process runs."""
SIGNALLED: Final = frozenset({contract.Exit.PREEMPTED, 128 + 2, 128 + 15})
"""Exit codes of a process that was stopped by a signal and did not fail; so do all negative codes."""


class LocalSweep:
    """A sweep that runs on this machine."""

    def __init__(
        self,
        plan: SweepPlan,
        on_event: OnEvent,
        *,
        max_parallel: int | None = None,
        retry_failed: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`on_event` is called on the thread that calls `run`. `max_parallel` is by default the number of points that
        this machine has GPUs for, at least one."""
        self.plan = plan
        self.runs = [PointRun(point=point) for point in plan.points]
        self._on_event, self._retry = on_event, retry_failed
        python = plan.points[0].inputs.python
        if python and python.error:
            raise python.error
        need = max(one.plan.machine.gpus * one.plan.machine.nodes for one in plan.points)
        shares = gpu_shares(visible_gpus(environ), need)
        self._slots = [shares[slot % len(shares)] for slot in range(max_parallel or len(shares))]
        self._supervisors: dict[str, SupervisorHandle] = {}
        self._ended: queue.Queue[tuple[PointRun, dict[str, str], LaunchError | None]] = queue.Queue()
        self._stopped = False
        self._earlier_mark = ""
        """Version of the mark of an earlier cancellation."""
        self._local_output = None if plan.output.startswith("gs://") else LocalFolder(Path(plan.output))

    def run(self) -> None:
        """Run all points to their ends. A point that fails does not stop the others; its error is in its PointRun.

        On KeyboardInterrupt all points are stopped, which saves their checkpoints. Raises LaunchError: the output or
        the code cannot be used.
        """
        self._record()
        source = self.plan.points[0].inputs.source
        with snapshot(Code(source.code, None, source.installed)) as code:
            try:
                while not all(run.has_ended for run in self.runs):
                    self._obey_cancel()
                    self._start_points(code)
                    self._take_end()
            except BaseException:
                self._stop()
                raise

    def _record(self) -> None:
        """Record the sweep's points beside their folders.

        Raises UsageError: another sweep has the name, or the folder can't be written.
        """
        if self._local_output:
            with use_errors():
                self._earlier_mark = mark_version(self._local_output, self.plan.name)
                write_record(self._local_output, self.plan)

    def _obey_cancel(self) -> None:
        """After `launch cancel`, cancel the active points and start no others."""
        if not self._local_output or mark_version(self._local_output, self.plan.name) in ("", self._earlier_mark):
            return
        for run in self.runs:
            folder = Path(run.point.plan.run_folder or "")
            if run.state == "waiting":
                run.state = "cancelled"
                self._on_event(PointChanged(run=run, kind="ended"))
            elif run.state == "active" and is_taken(folder):
                request_cancel(LocalFolder(folder))  # each time: it may have begun after launch cancel looked

    def _start_points(self, code: Code) -> None:
        """Start waiting points while slots are free. A point that another process runs is left for later."""
        for run in self.runs:
            if run.state != "waiting" or not self._slots:
                continue
            run_folder = run.point.plan.run_folder or ""
            if not run_folder.startswith("gs://") and is_taken(Path(run_folder)):
                continue
            storage = open_folder(run_folder)
            if self._has_ended(run, storage):
                self._on_event(PointChanged(run=run, kind="ended"))
                continue
            run.state, slot = "active", self._slots.pop(0)
            threading.Thread(target=self._run_point, args=(run, code, slot), daemon=True).start()
            self._on_event(PointChanged(run=run, kind="started"))

    def _has_ended(self, run: PointRun, storage: Storage) -> bool:
        """Set the state of a point that an earlier command has run to its end; return whether one has."""
        end = last_end(storage, run)
        if end is None or not (end.succeeded or has_failed(end)) or (has_failed(end) and self._retry):
            return False
        run.state, run.had_ended, run.ended = "succeeded" if end.succeeded else "failed", True, end.time
        if not end.succeeded:
            name, code = next((name, code) for name, code in end.exit_codes.items() if code)
            run.error = JobFailed(f"{name} exited with {code}", "--retry-failed runs it again")
        return True

    def _run_point(self, run: PointRun, code: Code, slot: dict[str, str]) -> None:
        """Run a point to its end, and report that to the main thread."""

        def started(supervisor: SupervisorHandle) -> None:
            self._supervisors[run.point.run] = supervisor
            if self._stopped:
                supervisor.stop()

        error: LaunchError | None = None
        point, environ = run.point, {**os.environ, **slot}
        try:
            run_planned(point.plan, point.inputs, lambda _, __: None, code=code, environ=environ, on_start=started)
        except LaunchError as failed:
            error = failed
        except Exception as trouble:  # noqa: BLE001 - the sweep waits for the end of each point
            error = LaunchError(f"unexpected error: {type(trouble).__name__}: {trouble}")
        self._supervisors.pop(point.run, None)
        self._ended.put((run, slot, error))

    def _take_end(self) -> None:
        """Wait until a point has ended, or until it is time to poll those that other processes run."""
        try:
            run, slot, error = self._ended.get(timeout=TAKEN_SECONDS)
        except queue.Empty:
            return
        self._slots.append(slot)
        folder = run.point.plan.run_folder or ""
        is_refused = isinstance(error, UsageError)  # maybe because another process had the folder
        if is_refused and not folder.startswith("gs://") and is_taken(Path(folder)):
            run.state = "waiting"
            return
        end = last_end(open_folder(folder), run) if is_refused else None
        if end and end.succeeded:
            error, run.had_ended, run.ended = None, True, end.time
        may_be_cancelled = error is not None and not is_refused and self._local_output is not None
        was_cancelled = may_be_cancelled and is_attempt_cancelled(Path(folder))
        run.state = "cancelled" if was_cancelled else "failed" if error else "succeeded"
        run.error = error
        self._on_event(PointChanged(run=run, kind="ended"))

    def _stop(self) -> None:
        """Stop all points, as Ctrl-C stops `launch local`, and wait until they have saved."""
        self._stopped = True
        for supervisor in [*self._supervisors.values()]:
            supervisor.stop()
        for supervisor in [*self._supervisors.values()]:
            with suppress(subprocess.TimeoutExpired):
                supervisor.process.wait(STOP_SECONDS)


def gpu_shares(visible: tuple[str, ...], need: int) -> list[dict[str, str]]:
    """Return the environment of each point that the GPUs allow to run at a time; one that changes nothing if they do
    not suffice for two."""
    count = len(visible) // need if need else 0
    if count < 2:
        return [{}]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(visible[at * need : (at + 1) * need])} for at in range(count)]


def last_end(storage: Storage, run: PointRun) -> End | None:
    """Return how the newest attempt of this computation ended; None: there is none, or its end was not recorded."""
    inputs = run.point.inputs
    with use_errors():
        number = newest_attempt(storage)
        end = read_end(storage, number) if number else None
        if end is None:
            return None
        own = fingerprint(parse_request(run.point.plan.attempts[0].request), inputs.context.code.digest)
        return end if read_facts(storage, number).get("job") == own else None


def has_failed(end: End) -> bool:
    """Return whether a process failed, other than because it was stopped."""
    return not end.stopped and any(code > 0 and code not in SIGNALLED for code in end.exit_codes.values())

"""Exit before the end of training: after a preemption notice, an error, or another rank's failure."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from threading import Thread
from typing import NoReturn

from launch_train.common.console import say
from launch_train.common.errors import OutputError, PreemptedError
from launch_train.common.process_exit import exit_process
from launch_train.common.shutdown_signal import PEER_SECONDS, ShutdownSignal
from launch_train.distributed.consensus import seconds_to_save
from launch_train.distributed.peers import Peers
from launch_train.distributed.process_group import use_device
from launch_train.trainer.build import Run
from launch_train.trainer.reporting import add_events, compare_replicas, event
from launch_train.trainer.resume import snapshot

ROWS_SECONDS = 1.5
"""Time limit for writing the last rows when a rank has failed: the other ranks wait for this one."""

SAVES_LEFT = 3
"""How many times the usual duration of a save must remain while the save of a best checkpoint is awaited."""


def save_and_exit(run: Run, shutdown: ShutdownSignal) -> NoReturn:
    """Save a checkpoint within the notice period and exit. All ranks call it at the same step."""
    step, shutdown.saving = run.state["step"], True
    deadline = time.monotonic() + seconds_to_save(run.ranks, shutdown)
    rows = run.recorder.take_block()
    with suppress(Exception):  # a broken sink was reported before; saving the state matters more
        run.sink.put([*add_events(run, rows), event("preempted", step=step)])
    run.guard.check(rows)
    if run.saver is None:
        raise SystemExit(128 + signal.SIGTERM)
    compare_replicas(run)
    run.saver.finish_best(deadline - time.monotonic() - SAVES_LEFT * run.saver.seconds)
    try:
        run.saver.save(step, snapshot(run), limit=deadline - time.monotonic())
    except OutputError as error:
        if run.ranks.rank == 0:
            print(f"preempted at step {step}; checkpoint not saved in time: {error}", flush=True)
        raise SystemExit(128 + signal.SIGTERM) from error
    try:
        run.sink.close(ROWS_SECONDS)
    except Exception as error:  # noqa: BLE001 - the state is saved, and the node uploads rows left on the disk
        say(str(error))
    raise PreemptedError(f"preempted: checkpoint saved at step {step}; the next start resumes from there")


def exit_if_stuck(run: Run, peers: Peers, shutdown: ShutdownSignal) -> None:
    """Exit after SIGTERM if the training loop can't, because it waits in native code for a peer. Runs in a thread.

    After a preemption notice, wait for the running step as long as a save still fits into the notice period. Once a
    peer has failed, nothing can be saved any more.
    """

    def leave_at() -> float:
        """Return the time.monotonic() until which the loop may finish its step."""
        least = shutdown.at + PEER_SECONDS
        if not shutdown.preempted or peers.failed():
            return least
        return max(least, shutdown.save_by - (run.saver.seconds if run.saver else 0.0))

    while time.monotonic() < leave_at() or shutdown.saving:
        if run.ranks.world == 1 or not shutdown.inside:
            return
        time.sleep(0.1)
    if shutdown.preempted and not peers.failed():
        elapsed = time.monotonic() - shutdown.at
        why = f"the step did not end within {elapsed:.0f} s of the preemption notice; no checkpoint saved"
    else:
        why = "another rank has failed"
    say(f"rank {run.ranks.rank} exits: {why}")
    with suppress(Exception):
        run.sink.close(ROWS_SECONDS)
    exit_process(128 + signal.SIGTERM)


def write_last_rows(run: Run) -> None:
    """Try to write the recorded rows after an error.

    In a thread with a time limit: a GPU that waits for a dead rank never responds.
    """

    def write() -> None:
        use_device(run.ranks.device)
        with suppress(Exception):
            run.sink.put(run.recorder.take_block(alone=True))
        with suppress(Exception):
            run.sink.close(ROWS_SECONDS)

    if run.ranks.rank == 0:
        writer = Thread(target=write, name="last rows", daemon=True)
        writer.start()
        writer.join(2 * ROWS_SECONDS)

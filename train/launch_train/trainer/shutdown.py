"""How a run leaves before its end: preempted, after an error, or because the others have gone."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from threading import Thread
from typing import NoReturn

from launch_train.common.errors import OutputError, PreemptedError
from launch_train.common.process_exit import PEER_SECONDS, PREEMPTION_SECONDS, ShutdownSignal, leave
from launch_train.distributed.peers import Peers
from launch_train.distributed.process_group import use_device
from launch_train.trainer.build import Run
from launch_train.trainer.reporting import compare_now, event, with_events
from launch_train.trainer.resume import to_save

ROWS_SECONDS = 1.5
"""What the last rows get when a rank has gone: the others wait for this one."""


def give_way(run: Run, told: ShutdownSignal) -> NoReturn:
    """A preemption: save once, and leave. All ranks are here at the same step."""
    step, left = run.state["step"], PREEMPTION_SECONDS - (time.monotonic() - told.at if told.signum else 0.0)
    told.saving = True
    rows = run.recorder.block()
    with suppress(Exception):  # a sink that is broken said so before; the state is what matters now
        run.sink.put([*with_events(run, rows), event("preempted", step=step)])
    run.guard.look(rows)
    if run.saver is None:
        raise SystemExit(128 + signal.SIGTERM)
    compare_now(run)
    try:
        run.saver.save(step, to_save(run), limit=left)
    except OutputError as error:
        if run.ranks.rank == 0:
            print(f"preempted at step {step}, and not saved in time: {error}", flush=True)
        raise SystemExit(128 + signal.SIGTERM) from error
    try:
        run.sink.close(ROWS_SECONDS)
    except Exception as error:  # noqa: BLE001 - the state is safe, and what is left on the disk the node sends
        print(f"train: {error}", file=sys.stderr, flush=True)
    raise PreemptedError(f"preempted; all is saved, and another start goes on behind step {step}")


def leave_if_stuck(run: Run, peers: Peers, told: ShutdownSignal) -> None:
    """End this process from a thread, after SIGTERM, if its loop can't because it waits in native code for a peer.

    After a preemption notice it waits for peers that still run, however long their step takes, as long as a save fits
    into the remaining time. Once a peer has failed, nothing can be saved any more.
    """
    while time.monotonic() < told.at + _patience(run, peers, told) or told.saving:
        if run.ranks.world == 1 or not told.inside:
            return
        time.sleep(0.1)
    if told.preempted and not peers.failed():
        why = f"the step did not end within {time.monotonic() - told.at:.0f} s of the preemption notice; not saved"
    else:
        why = "another rank has failed"
    print(f"train: rank {run.ranks.rank} exits: {why}", file=sys.stderr, flush=True)
    with suppress(Exception):
        run.sink.close(ROWS_SECONDS)
    leave(128 + signal.SIGTERM)


def _patience(run: Run, peers: Peers, told: ShutdownSignal) -> float:
    """Return the seconds from the signal that the loop has to finish its step."""
    if not told.preempted or peers.failed():
        return PEER_SECONDS
    return max(PEER_SECONDS, PREEMPTION_SECONDS - (run.saver.seconds if run.saver else 0.0))


def save_rows(run: Run) -> None:
    """After an error: what was recorded is written, if that still works; the error itself matters more.

    From a thread, which is not waited for too long: a GPU that waits for a dead rank never answers.
    """
    if run.ranks.rank == 0:
        saving = Thread(target=_save_rows, args=(run,), name="last rows", daemon=True)
        saving.start()
        saving.join(2 * ROWS_SECONDS)


def _save_rows(run: Run) -> None:
    use_device(run.ranks.device)
    with suppress(Exception):
        run.sink.put(run.recorder.block(alone=True))
    with suppress(Exception):
        run.sink.close(ROWS_SECONDS)

"""Report training: rows and events for the run folder, progress lines for the terminal."""

from __future__ import annotations

import time
from typing import Any

from launch_train.checkpointing.resume_loader import newest_manifest
from launch_train.common import console
from launch_train.common.errors import DisagreementError, NonFiniteError
from launch_train.distributed.process_group import run_on_rank_0
from launch_train.telemetry.rows import Row
from launch_train.trainer.build import Run


def report_if_due(run: Run) -> None:
    """If a block of steps is complete, write its rows, and print a progress line at most once a second."""
    step = run.state["step"]
    if not run.recorder.ends_block(step, run.config.log_every) and step < run.config.steps:
        return
    is_first_block = not run.recorder.median_seconds
    rows = write_rows(run)
    if is_first_block:
        run.sink.flush(0.0)  # without waiting: the first step of a start is in the run folder soon
    if run.replica_check.due(step):
        run.replica_check.compare(step, run.parameters, run.optimizer)
    if run.ranks.rank == 0 and run.pace.ready(last=rows[-1]["step"] == run.config.steps):
        seconds_left = run.recorder.median_seconds * (run.config.steps - rows[-1]["step"])
        print(console.step_line(rows[-1], run.config.steps, run.source.unit, seconds_left), flush=True)


def write_rows(run: Run) -> list[Row]:
    """Write the rows since the last block, with their events.

    Raises, on all ranks: NonFiniteError (too many skipped steps in a row), DisagreementError.
    """
    rows = run.recorder.take_block()
    try:
        run.guard.check(rows)
    except NonFiniteError as error:
        rows = [row for row in rows if row["step"] <= error.step]  # the steps queued after it don't count
        raise
    finally:
        run.sink.put(add_events(run, rows))
    raise_if_replicas_differ(run)
    return rows


def compare_replicas(run: Run) -> None:
    """Compare the ranks' states now, before a checkpoint. Raises DisagreementError on all ranks if they differ."""
    raise_if_replicas_differ(run)
    run.replica_check.compare(run.state["step"], run.parameters, run.optimizer)
    raise_if_replicas_differ(run)


def raise_if_replicas_differ(run: Run) -> None:
    """Raise DisagreementError on all ranks if the last comparison found a difference."""
    difference = run.replica_check.read(run.recorder.median_seconds)
    if difference is None:
        return
    saved = run_on_rank_0(run.ranks, lambda: newest_manifest(run.storage) if run.storage else None)
    fields = {**difference._asdict(), "ranks": [*difference.ranks]}
    run.sink.put([event("ranks_differ", **fields, checkpoint=saved and saved.folder)])
    checkpoint = f"the last good checkpoint is {saved.folder}" if saved else "no checkpoint was saved yet"
    raise DisagreementError(
        f"{difference.describe(run.ranks.world)}. The result must not be trusted: check those ranks' GPUs and memory; "
        f"{checkpoint}; the next start resumes from step {saved.step if saved else 0}"
    )


def add_events(run: Run, rows: list[Row]) -> list[Row]:
    """Return the rows, then an event for each skipped step, each reduction of the micro-batch on any rank, and a rank
    that has become slow."""
    events: list[Row] = []
    for row in rows:
        if "skipped" in row:
            events.append(event("non_finite", step=row["step"], samples=run.source.drawn(row["step"])))
        if row.get("micro_batch", run.state["micro_batch"]) != run.state["micro_batch"]:
            run.state["micro_batch"] = row["micro_batch"]
            events.append(event("out_of_memory", step=row["step"], micro_batch=row["micro_batch"]))
    slow, run.recorder.slow = run.recorder.slow, None
    if slow:
        events.append(event("slow_rank", step=rows[-1]["step"], **slow._asdict()))
        if run.ranks.rank == 0:
            print(
                f"step {rows[-1]['step']}: the ranks wait for rank {slow.rank}, which works {slow.seconds:.3g} s in a "
                f"step before the exchange of gradients (median rank: {slow.median:.3g} s)",
                flush=True,
            )
    return [*rows, *events]


def event(name: str, **fields: Any) -> Row:
    """Return a row for an event rather than a step."""
    return {"event": name, "time": time.time(), **fields}

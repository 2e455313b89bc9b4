"""What a run says while it trains: rows and events for the run folder, lines for the terminal."""

from __future__ import annotations

import time
from typing import Any

from launch_train.checkpointing.loader import newest_manifest
from launch_train.common import console
from launch_train.common.errors import DisagreementError, NonFiniteError
from launch_train.distributed.process_group import run_on_rank_0
from launch_train.telemetry.rows import Row
from launch_train.trainer.build import Run


def tell_start(run: Run) -> None:
    run.sink.put([event("start", **run.facts)])
    if run.resumed:
        run.sink.put([event("resumed", step=run.resumed.step, path=run.resumed.folder)])
        if run.ranks.rank == 0 and run.is_done:
            print("nothing is left to do", flush=True)


def report_if_due(run: Run) -> None:
    """Write a block of rows, and now and then a line."""
    step = run.state["step"]
    if not run.recorder.due(step, run.config.log_every) and step < run.config.steps:
        return
    rows = block(run)
    if run.replicas.due(step):
        run.replicas.compare(step, run.parameters, run.optimizer)
    if run.ranks.rank == 0 and run.pace.ready(last=rows[-1]["step"] == run.config.steps):
        left = run.recorder.usual * (run.config.steps - rows[-1]["step"])
        print(console.line(rows[-1], run.config.steps, run.source.unit, left), flush=True)


def block(run: Run) -> list[Row]:
    """Write the rows since the last block, and what was skipped. Raises NonFiniteError and DisagreementError on all
    ranks alike."""
    rows = run.recorder.block()
    try:
        run.guard.look(rows)
    except NonFiniteError as error:  # the run ended before the steps that were queued behind
        rows = [row for row in rows if row["step"] <= error.step]
        raise
    finally:
        run.sink.put(with_events(run, rows))
    heed_difference(run)
    return rows


def compare_now(run: Run) -> None:
    """Compare the ranks' states now, before a checkpoint. Raises DisagreementError, on all ranks alike: they differ."""
    heed_difference(run)
    run.replicas.compare(run.state["step"], run.parameters, run.optimizer)
    heed_difference(run)


def heed_difference(run: Run) -> None:
    """Raise DisagreementError, on all ranks alike, if the last comparison found a difference."""
    found = run.replicas.read(run.recorder.usual)
    if found is None:
        return
    saved = run_on_rank_0(run.ranks, lambda: newest_manifest(run.storage) if run.storage else None)
    run.sink.put(
        [event("ranks_differ", **{**found._asdict(), "ranks": [*found.ranks]}, checkpoint=saved and saved.folder)]
    )
    good = f"the last good checkpoint is {saved.folder}; the" if saved else "no checkpoint was saved yet; the"
    raise DisagreementError(
        f"{found.words(run.ranks.world)}. The result must not be trusted: check those ranks' GPUs and memory; {good} "
        f"next start resumes from step {saved.step if saved else 0}"
    )


def with_events(run: Run, rows: list[Row]) -> list[Row]:
    """The rows, and what happened in their steps, on any rank."""
    told = [*rows]
    for row in rows:
        if "skipped" in row:
            told.append(event("non_finite", step=row["step"], samples=run.source.drawn(row["step"])))
        if row.get("micro_batch", run.state["micro_batch"]) != run.state["micro_batch"]:
            run.state["micro_batch"] = row["micro_batch"]
            told.append(event("out_of_memory", step=row["step"], micro_batch=row["micro_batch"]))
    return told


def event(name: str, **fields: Any) -> Row:
    """A row that isn't a step's."""
    return {"event": name, "time": time.time(), **fields}

"""The console output of training: lines, progress and a summary. 60 columns, because a prefix may be added."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from launch_train.common import contract
from launch_train.common.contract import MEAN_STEPS
from launch_train.common.text import clock, plural, si


def say(line: str) -> None:
    """Write a line to stderr in one write, so that lines of several processes don't mix."""
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"train: {line}\n")
        sys.stderr.flush()


def step_line(row: Mapping[str, Any], steps: int, unit: str, seconds_left: float) -> str:
    """`step 120/300  loss 2.4312  lr 9.1e-04  12.3k tokens/s  ETA 0:41`."""
    rate = si(row[f"{unit}_per_s"])
    loss = "nan" if row["loss"] is None else f"{row['loss']:.4f}"
    count = f"{row['step']:>{len(str(steps))}}/{steps}"
    return f"step {count}  loss {loss}  lr {row['lr']:.1e}  {rate} {unit}/s  ETA {clock(seconds_left)}"


class RateLimiter:
    """Limits output to one line a second; the last line is always printed."""

    def __init__(self) -> None:
        self._printed = 0.0

    def ready(self, *, last: bool) -> bool:
        now = time.monotonic()
        if not last and now - self._printed < 1:
            return False
        self._printed = now
        return True


def end_table(end: Mapping[str, Any], unit: str, where: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the table that closes a run, from its end event.

    Losses, speed and folder are omitted if launch started the run: it prints them (launcher.cli.ui.run_summary).
    """
    machine = f"{plural(end['world_size'], 'rank')}, {end['device']}, {end['precision']}"
    rows = [("steps", f"{end['step']} in {clock(end['seconds'])} on {machine}")]
    rows += [] if contract.RUN in env else _result_rows(end, unit)
    rows += [("model", f"{end['parameters']:,} parameters")]
    rows += [("sha256", f"{end['parameters_sha256'][:16]}…  {agreement(end['world_size'])}")]
    rows += [] if contract.RUN in env else [("run folder", where or f"none: {contract.RUN_FOLDER} is not set")]
    return "\n".join(["", *(f"  {name:<11} {value}" for name, value in rows), ""])


def _result_rows(end: Mapping[str, Any], unit: str) -> list[tuple[str, str]]:
    mfu = f", MFU {end['mfu']:.1%}" if end.get("mfu") else ""
    first, last = _nats(end["train_loss_first"]), _nats(end["train_loss_last"])
    short = end["step"] <= MEAN_STEPS  # both are the mean of all steps
    loss = f"{last} (mean of all steps)" if short else f"{first} -> {last} (means of {end['train_loss_steps']} steps)"
    return [("loss", loss), *_held_out(end), ("speed", f"{si(end[f'{unit}_per_s'])} {unit}/s" + mfu)]


def agreement(world: int) -> str:
    return "1 rank" if world == 1 else f"all {world} ranks agree"


def _held_out(end: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the held-out loss, its perplexity or accuracy, and the unigram entropy to compare it with."""
    if end.get("eval_loss") is None:
        return []
    of_text = "data_unit" in end  # perplexity is defined for text
    perplexity = f"  (perplexity {math.exp(min(end['eval_loss'], 700)):.2f})" if of_text else ""
    right, five = end.get("eval_accuracy"), end.get("eval_accuracy_top5")
    accuracy = f"  (accuracy {right:.1%}, among the first five {five:.1%})" if right is not None else ""
    rows = [("held out", f"{_nats(end['eval_loss'])}{perplexity}{accuracy}")]
    if end.get("unigram_entropy") is not None:
        rows += [("", f"{_nats(end['unigram_entropy'])} is the unigram entropy")]
    return rows


def _nats(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"

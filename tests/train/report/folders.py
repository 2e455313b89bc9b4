"""Run folders made up for the tests of reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch_train.common.storage import LocalFolder
from launch_train.runfolder.run import RunData, read_run

T = 1_750_000_000.0
"""When the runs begin, in Unix seconds."""


def lines(records: Iterable[Any]) -> str:
    return "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)


def rows(steps: Iterable[int], at: float, seconds: float = 1.0, **values: Any) -> list[dict[str, Any]]:
    """Rows of steps that take `seconds` each, the first from `at` on."""
    found = []
    for place, step in enumerate(steps, start=1):
        time = at + place * seconds
        found.append({"step": step, "loss": 5.0 / step, "step_s": seconds, "time": time, **values})
    return found


def write(folder: Path, parts: Mapping[str, Any]) -> Path:
    """Write files by name: lines of JSON, or one object."""
    for name, content in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) if isinstance(content, Mapping) else lines(content))
    return folder


def read(folder: Path) -> RunData:
    return read_run(LocalFolder(folder))


PLACE = {"machine": "g2-standard-24", "provisioning": "spot", "region": "us-central1"}


def preempted(folder: Path) -> Path:
    """A run of two attempts. The first is preempted at step 30, of which the last five are lost; the second finishes.

    Attempt 1: created at T, machines from T+100, first step ends at T+161, preempted, ends at T+200 (paid 100 s).
    Attempt 2: created at T+300, machines from T+350, resumes from step 25, ends at T+460 (paid 110 s).
    """
    plan = {
        "run": "run-0123abcd",
        "target": "vm",
        "machine": {"machine_type": "g2-standard-24", "nodes": 1},
        "attempts": [
            {"region": "us-central1", "provisioning": "spot", "machine_type": "g2-standard-24", "usd_per_hour": 3.6}
        ],
        "spec": {"name": "run", "run": {"args": ["--lr", "0.1"]}, "env": {"WORD": "canary-env"}},
    }
    start = {"event": "start", "config": {"steps": 50}, "world_size": 2, "device": "cuda", "precision": "bf16"}
    return write(
        folder,
        {
            "plan.json": plan,
            "attempts/0001.json": {**PLACE, "job": "a", "time": T},
            "attempts/0001.verdict.json": {
                "state": "FAILED",
                "kind": "preempted",
                "cause": "preempted",
                "time": T + 200,
                "billed": 100.0,
            },
            "attempts/0002.json": {**PLACE, "job": "b", "time": T + 300},
            "attempts/0002.verdict.json": {
                "state": "SUCCEEDED",
                "kind": "succeeded",
                "cause": "",
                "time": T + 460,
                "billed": 110.0,
            },
            "metrics/0001-0000-0000-000000.jsonl": [
                {**start, "time": T + 150},
                *rows(range(1, 31), T + 160),
                {"event": "preempted", "step": 30, "time": T + 192},
            ],
            "metrics/0002-0000-0000-000000.jsonl": [
                {**start, "time": T + 400},
                {"event": "resumed", "step": 25, "time": T + 405},
                *rows(range(26, 51), T + 420, 1.2),
                {"event": "eval", "step": 50, "loss": 0.2, "time": T + 455},
                {"event": "end", "step": 50, "time": T + 456},
            ],
        },
    )

"""What the trainer tells the node to expect: of a step soon another one, and of nothing else anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch_train.checkpointing.async_saver import Saver
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.heartbeat import Heartbeat
from launch_train.data.loader import BatchLoader
from launch_train.distributed.process_group import Ranks
from launch_train.trainer import train as loop
from tests.train.trials import CONFIG, train

pytestmark = pytest.mark.usefixtures("one_thread")


def run(
    lately: float,
    hang_after: float | str = "auto",
    *,
    records: bool = False,
    world: int = 1,
    nodes: int = 1,
    slow: bool = False,
    compiled: bool = False,
) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(hang_after=hang_after),
        recorder=SimpleNamespace(recent_seconds=lately),
        profiler=SimpleNamespace(records=records),
        ranks=SimpleNamespace(world=world, nodes=nodes),
        source=SimpleNamespace(slow=slow),
        is_compiled=compiled,
    )


@pytest.mark.parametrize(
    ("one", "step", "data", "rare"),
    [
        (run(0.1), 60, 600, 1800),
        (run(20.0), 200, 600, 1800),
        (run(500.0), 5000, 5000, 5000),
        (run(0.1, 5), 5, 5, 1800),
        (run(0.1, 2000), 2000, 2000, 2000),
        (run(0.1, "off"), inf, inf, inf),
        (run(0.0), inf, inf, inf),
        (run(0.0, 5), inf, inf, inf),
        (run(0.1, records=True), inf, inf, inf),
        (run(0.1, world=2), 60, 600, 1800),
        (run(0.1, slow=True), 60, 600, 1800),
        (run(0.1, world=2, slow=True), 600, 600, 1800),
        (run(0.1, world=2, compiled=True), 60, 600, 1800),
        (run(0.1, world=2, nodes=2), 60, 600, 1800),
        (run(0.1, world=2, nodes=2, compiled=True), 1800, 1800, 1800),
        (run(0.1, 5, world=2, nodes=2, compiled=True), 5, 5, 1800),
    ],
)
def test_how_long_a_step_may_take(one: Any, step: float, data: float, rare: float) -> None:
    """With peers a step may be one in which another rank waits for its data, or, on another node, compiles."""
    expected: list[float] = []
    one.heartbeat = SimpleNamespace(expect=expected.append)
    loop.set_deadline(one)
    loop.set_deadline(one, loop.MIN_DATA_SECONDS)
    loop.set_deadline(one, loop.MIN_RARE_SECONDS)
    assert expected == [step, data, rare]


def test_only_steps_and_batches_of_evaluations_are_expected_soon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the first step, which compiles and waits for data, nor the end; after a while data, the first batch of an
    evaluation and a checkpoint."""
    now, seen = inf, defaultdict[str, list[float]](list)

    def expect(_line: Heartbeat, seconds: float) -> None:
        nonlocal now
        now = seconds

    def noting(owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            seen[name].append(now)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(Heartbeat, "expect", expect)
    for owner, name in (
        *(
            (loop, name)
            for name in (
                "warm_up",
                "resume_or_start",
                "save_or_stop",
                "forward_backward",
                "parameters_sha256",
                "barrier",
            )
        ),
        *((BatchLoader, "train"), (BatchLoader, "held_out"), (Saver, "begin"), (Saver, "save")),
    ):
        noting(owner, name)
    train(tmp_path / "run", checkpoint={"minutes": 1e-6}, eval={"every": 6, "batches": 3})
    assert seen["resume_or_start"] == [inf]
    assert set(seen["begin"]) == {1800.0}
    for name in ("warm_up", "parameters_sha256", "barrier", "save"):
        assert seen[name] == [inf], name
    assert seen["forward_backward"] == [inf, *[60.0] * 23]
    assert seen["train"] == [inf, *[600.0] * 23]
    assert seen["held_out"] == [1800.0, 600.0, 600.0] * 4
    evaluation = [1800.0, 60.0, 60.0]
    assert seen["save_or_stop"] == [inf, *[60.0] * 5, *[*evaluation, *[60.0] * 7] * 3, *evaluation, 60.0]
    assert now == inf


@pytest.mark.parametrize(
    ("node", "hang_after", "hours"), [(True, "auto", 2), (True, 36_000, 12), (True, "off", None), (False, "auto", None)]
)
def test_collectives_wait_longer_than_the_hang_watch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, node: bool, hang_after: float | str, hours: float | None
) -> None:
    """Else they would end a run whose ranks wait for one that waits for data, or compiles."""
    seen: list[timedelta] = []
    monkeypatch.setattr(loop, "raise_timeout", seen.append)
    env = {contract.WATCH: str(tmp_path)} if node else {}
    config = {**CONFIG, "model": {**CONFIG["model"], "n_embd": 4}, "steps": 1, "eval": {"every": 0}, "optimizer": {}}
    loop.train(parse({**config, "hang_after": hang_after}), Ranks(), env)
    assert seen == ([timedelta(hours=hours)] if hours else [])


def test_a_smaller_micro_batch_may_compile_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    now, after = 0.0, list[float]()

    def expect(_line: Heartbeat, seconds: float) -> None:
        nonlocal now
        now = seconds

    real, failed = loop.forward_backward, list[int]()

    def gradients(one: Any, batch: Any) -> Any:
        if one.state["step"] == 4 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        if failed and not after:
            after.append(now)
        return real(one, batch)

    monkeypatch.setattr(Heartbeat, "expect", expect)
    monkeypatch.setattr(loop, "forward_backward", gradients)
    train(tmp_path / "run")
    assert after == [1800.0]

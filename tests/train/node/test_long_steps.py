"""A preemption at the beginning of a step of 18 s, by a platform that kills after 30 s: ranks, torchrun and node are
real processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.common.contract import Exit
from tests.train.nodes import Machines, machines, until
from tests.train.trials import read

SCRIPT = """
import os, pathlib, time
import torch, torch.distributed as dist
from launch_train import checkpoint, metrics
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
for step in range(checkpoint.restore(state) + 1, 4):
    pathlib.Path(f"step-{step}-{dist.get_rank()}").touch()
    time.sleep(18 if str(step) == os.environ.get("LONG_STEP") else 0.1)
    loss = model(torch.ones(2)).sum()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    metrics.log(step, loss=loss.item())
    if checkpoint.due(step):
        checkpoint.save(step, state)
        if checkpoint.preempted():
            checkpoint.leave()
checkpoint.save(3, state, wait=True)
"""


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as crew:
        yield crew


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2])
def test_a_run_preempted_in_a_step_of_18_s_resumes_without_a_lost_step(crew: Machines, step: int) -> None:
    argv = ("--launcher", "torchrun", "--script", crew.script(SCRIPT))
    node = crew.start(*argv, env={"LAUNCH_PROCESSES": "2", "LONG_STEP": str(step)})
    until(lambda: all((crew.folder / f"step-{step}-{rank}").exists() for rank in (0, 1)), "the long step")
    node.send(signal.SIGTERM)
    try:
        assert node.process.wait(contract.NOTICE_SECONDS) == Exit.PREEMPTED, node.text
    except subprocess.TimeoutExpired:
        pytest.fail(f"killed by the platform: {node.text}")
    again = crew.start(*argv, env={"LAUNCH_PROCESSES": "2"})
    assert again.wait() == 0, again.text
    assert f"resumed from step {step} " in again.text
    rows = [row["step"] for row in read(crew.run_folder).rows]
    assert rows == [1, 2, 3]

"""docs/scripts.md's loop of epochs: preempted anywhere, the losses of all steps are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from textwrap import indent

import pytest

from tests.command import ROOT
from tests.train import trials
from tests.train.nodes import machines
from tests.train.script_api.user_script import run, run_ranks

SECTION = (ROOT / "docs/scripts.md").read_text().partition("### Epochs")[2].partition("\n## ")[0]
LOOP, DATASET = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)

SETTING = """
import multiprocessing, os
import torch
multiprocessing.set_start_method("fork", force=True)  # as in a script that an interpreter starts
multiprocessing.set_forkserver_preload(["torch"])
from launch_train import checkpoint
images, labels = torch.randn(22, 6, generator=torch.Generator().manual_seed(0)), torch.arange(22) % 3
DATASET
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(5 + rank)
dataset, batch_size, epochs = Augmented(), 4 // world, 3
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.1)
forward = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
due = checkpoint.due
checkpoint.due = lambda step: (step == STOP and os.kill(os.getpid(), 15), due(step))[1]
LOOP
metrics._default().close()
"""
PER_EPOCH = 6
STEPS = 3 * PER_EPOCH


def text(stop: int = 0, loop: str = LOOP) -> str:
    return SETTING.replace("DATASET", DATASET).replace("LOOP", loop).replace("STOP", str(stop))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("epochs") / "whole"
    assert run(text(), folder).code == 0
    losses = trials.losses(folder)
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stop", [PER_EPOCH + 3, 2 * PER_EPOCH])
def test_preempted_in_an_epoch_or_at_its_end(whole: dict[int, float], tmp_path: Path, stop: int) -> None:
    assert run(text(stop), tmp_path / "run").code == 75
    assert trials.losses(tmp_path / "run") == {step: whole[step] for step in range(1, stop + 1)}
    assert run(text(), tmp_path / "run", 1).code == 0
    assert trials.losses(tmp_path / "run") == whole


SLOW = "import time\ncheckpoint.due = lambda step: (print('step', step, flush=True), time.sleep(0.15), due(step))[2]\n"


def ranks_with_workers(before: str, workers: str) -> str:
    """The loop as a script for torchrun, with `before` in front of it: 51 steps of two ranks, 17 an epoch."""
    script = text(loop=before + LOOP).replace("(22", "(66")
    data, program = script.replace("num_workers=2,", workers).split("\nrank, world", 1)
    program = f"torch.distributed.init_process_group('gloo')\nrank, world{program}"
    program += "torch.distributed.destroy_process_group()\n"
    return f"{data}\nif __name__ == '__main__':\n{indent(program, '    ')}"


FORKSERVER = 'num_workers=2, persistent_workers=True, multiprocessing_context="forkserver",'


@pytest.mark.slow
def test_two_ranks_with_loader_workers_are_preempted_by_a_signal_to_the_group(tmp_path: Path) -> None:
    """As a platform preempts: the signal comes to the node, by its process group, and from there to the ranks. They are
    preempted twice, with loader workers by fork and by the fork server."""
    undisturbed = text().replace("(22", "(66").replace("num_workers=2,", "")
    assert [said.code for said in run_ranks(undisturbed, tmp_path / "whole")] == [0, 0]
    whole = trials.losses(tmp_path / "whole")
    assert list(whole) == list(range(1, 52))
    with machines(tmp_path) as crew:
        env = {"LAUNCH_PROCESSES": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for workers, stop in (("num_workers=2,", 20), (FORKSERVER, 40)):
            crew.script(ranks_with_workers(SLOW, workers))
            node = crew.start("--script", "work.py", env=env)
            node.await_text(f"step {stop}\n")
            os.killpg(node.process.pid, signal.SIGTERM)
            assert node.wait() == 75, node.text
            assert "DataLoader worker" not in node.text
            assert max(trials.losses(crew.run_folder)) % 17, "the end of an epoch"
        resumed = crew.start("--script", "work.py", env=env)
        assert resumed.wait() == 0, resumed.text
        assert "resumed from step" in resumed.text
        assert trials.losses(crew.run_folder) == whole


@pytest.mark.slow
@pytest.mark.parametrize("part", ["        generator=draws,\n", "[epoch * len(dataset) + index for index in sampler]"])
def test_each_part_of_it_is_needed(whole: dict[int, float], tmp_path: Path, part: str) -> None:
    """Without the loader's generator, or with a worker's own draws in place of the key's, a run differs."""
    less = LOOP.replace(part, "" if "generator" in part else "list(sampler)")
    assert less != LOOP
    if "generator" not in part:
        less = f"Augmented.__getitem__ = lambda _, key: (images[key] + torch.randn(6), labels[key])\n{less}"
    assert run(text(0, less), tmp_path / "whole").code == 0
    assert run(text(9, less), tmp_path / "run").code == 75
    assert run(text(0, less), tmp_path / "run", 1).code == 0
    assert trials.losses(tmp_path / "run") != trials.losses(tmp_path / "whole")

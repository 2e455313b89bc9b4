"""`launch_train.init`: a script of five lines, alone, under torchrun and under the node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from launch_train import checkpoint
from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.storage import LocalFolder
from launcher.runs.metrics.progress import ProgressReader
from tests.train import trials
from tests.train.forked import Ended, Forked
from tests.train.nodes import Machines, machines, until

NOTHING: Mapping[str, str] = MappingProxyType({})

SCRIPT = """
import os, pathlib, random, signal, time
import numpy as np, torch
import launch_train

def stop():
    notice = os.environ.get("LAUNCH_NOTICE")
    if not notice:
        os.kill(os.getpid(), signal.SIGTERM)
    pathlib.Path("ready").touch()
    while notice and not os.path.exists(notice):
        time.sleep(0.01)

run = launch_train.init(seed=7)
model = torch.nn.Linear(4, 1).to(run.device)
if run.world_size > 1:
    forward = torch.nn.parallel.DistributedDataParallel(model)
else:
    forward = model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.state.update(model=model, optimizer=optimizer)
run.own.update(rank=run.rank)
for step in run.steps(8, minutes=1e-6):
    if step == int(os.environ.get("STOP_AT", 0)):
        stop()
    x = torch.randn(3, 4) + random.random() + float(np.random.rand())
    loss = forward(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    run.log(step, loss=loss.item())
print(f"end rank {run.rank} of {run.world_size} on {run.device}: {model.weight.sum().item():.9f}", flush=True)
"""


def script(forked: Forked, folder: Path, env: Mapping[str, str] = NOTHING, text: str = SCRIPT) -> Ended:
    """Run the script in a process of its own, without any launch."""
    (folder / "work.py").write_text(text)
    return forked(env, argv=["work"], hook=f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, '')")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, launch_train; launch_train.init; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.slow
def test_alone_it_gives_the_same_numbers_each_time(tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LAUNCH_", "RANK", "WORLD"))}
    environ["OMP_NUM_THREADS"] = "1"  # as where it is forked
    first = subprocess.run(
        [sys.executable, "work.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert first.returncode == 0, first.stderr
    assert "end rank 0 of 1 on cpu" in first.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["work.py"]
    assert script(forked, tmp_path).stdout == first.stdout


@pytest.mark.slow
def test_interrupted_it_comes_to_the_same(tmp_path: Path, forked: Forked) -> None:
    whole = script(forked, tmp_path, environment(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert len(trials.losses(tmp_path / "whole")) == 8
    stopped = script(forked, tmp_path, {**environment(tmp_path / "run"), "STOP_AT": "3"})
    assert stopped.returncode == Exit.PREEMPTED, stopped.stderr
    progress = ProgressReader(LocalFolder(tmp_path / "run")).read_new()
    assert progress is not None
    assert (progress.step, progress.steps, progress.eta_seconds is not None) == (3, 8, True), "as `launch watch` has it"
    resumed = script(forked, tmp_path, environment(tmp_path / "run", 1))
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    assert trials.losses(tmp_path / "run") == trials.losses(tmp_path / "whole")
    assert own_ranks(tmp_path / "run") == [0]


def environment(folder: Path, generation: int = 0) -> dict[str, str]:
    return {contract.RUN_FOLDER: str(folder), contract.ATTEMPT: "1", contract.GENERATION: str(generation)}


def own_ranks(folder: Path) -> list[int]:
    return [part["own"]["rank"] for part in checkpoint.load(str(folder))["ranks"]]


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


@pytest.mark.slow
def test_under_the_node_two_ranks_stop_and_resume(one: Machines) -> None:
    argv, two = ("--script", one.script(SCRIPT)), {"LAUNCH_PROCESSES": "2"}
    stopped = one.start(*argv, env={**two, "STOP_AT": "3"})
    until(lambda: (one.folder / "ready").exists() or stopped.process.poll() is not None, "the third step")
    stopped.send(signal.SIGTERM)
    assert stopped.wait() == Exit.PREEMPTED, stopped.text
    resumed = one.start(*argv, env=two)
    assert resumed.wait() == Exit.OK, resumed.text
    assert re.search(r"resumed from step [345]\b", resumed.text)  # the ranks agree on a step a moment later
    ends = [line.split() for line in resumed.text.splitlines() if line.startswith("end rank")]
    assert sorted(words[2] for words in ends) == ["0", "1"]
    assert len({words[-1] for words in ends}) == 1, "the ranks' models differ"
    assert sorted(trials.losses(one.run_folder)) == list(range(1, 9))
    assert own_ranks(one.run_folder) == [0, 1]


@pytest.mark.parametrize(
    ("env", "text", "words", "code"),
    [
        ({"RANK": "0"}, SCRIPT, ["RANK is set", "MASTER_ADDR", "torchrun"], Exit.USAGE),
        ({}, SCRIPT.replace("seed=7", "seed=-1"), ["seed=-1", "2**32 - 1"], Exit.USAGE),
        ({}, SCRIPT.replace("seed=7", "seed='a'"), ["seed='a'"], Exit.USAGE),
        ({contract.VISIBLE_GPUS: "2"}, SCRIPT, ["2 GPUs", "can't use them"], Exit.UNFIT),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, forked: Forked, env: dict[str, str], text: str, words: list[str], code: int
) -> None:
    ended = script(forked, tmp_path, env, text)
    assert ended.returncode == code, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("train: ")
    assert all(word in line for word in words), line


def test_without_torch_it_says_so(tmp_path: Path, forked: Forked) -> None:
    hidden = "import sys\nsys.modules['torch'] = None\nimport launch_train\nlaunch_train.init()\n"
    ended = script(forked, tmp_path, text=hidden)
    assert ended.returncode == Exit.USAGE
    (line,) = ended.stderr.splitlines()
    assert "needs torch" in line

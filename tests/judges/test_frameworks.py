"""The specs of job_specs/frameworks: each script is preempted, and resumes on another machine from its checkpoint.

The processes are real, and so are the packages (`pip install -e ".[judges]"`). CI runs this as a step of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from launch_train.common.contract import Exit
from launch_train.monitoring.monitor import FIRST_SECONDS
from launch_train.node.process import descendants
from tests.command import SPECS
from tests.rendered import plan
from tests.train import trials
from tests.train.nodes import Node, machines, until

pytestmark = [pytest.mark.judges, pytest.mark.slow]

PREEMPTED = 128 + signal.SIGTERM
"""Exit code of a node whose script saves on its own: nobody knows whether it has."""
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Kept beside the packages: to compile TensorFlow's modules takes twice as long as to import them."""
ENDLESS = 100_000
"""Steps of a start that is preempted long before."""
SAVED_EVERY = 20


class Framework(NamedTuple):
    """A spec of job_specs/frameworks. `saved` is a file in the run folder that exists once the script has saved."""

    name: str
    saved: str
    code: int = PREEMPTED
    every: int = 1
    """Steps between two rows."""
    killed: bool = False
    """Its process is killed before the preemption, and restarted in place. The others' restarts are torchrun's."""
    processes: int = 2
    """Of the second start under torchrun. With one it resumes on fewer GPUs, and imports the framework once less."""


FRAMEWORKS = (
    Framework("torchrun", "own/checkpoint.pt"),
    Framework("accelerate", "metrics/*.jsonl", code=Exit.PREEMPTED, processes=1),
    Framework("lightning", "lightning/last.ckpt", processes=1),
    Framework("hf-trainer", "trainer/checkpoint-*/trainer_state.json", every=5, processes=1),
    Framework("keras", "keras/checkpoint", killed=True),
    Framework("jax", "jax/checkpoint.npz", killed=True),
    Framework("sklearn", "sklearn/model.joblib", killed=True),
)


class Job:
    """A job of a spec on machines of its own, which all have one run folder."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        self.run_folder = folder / "run"
        self._spec, self._folder, self._stack = SPECS / "frameworks" / name / "job.yaml", folder, stack
        self._needs_tensorflow = name == "keras"
        self._request = plan("vertex", self._spec)["attempts"][0]["request"]["jobSpec"]["workerPoolSpecs"][0]

    def start(self, number: int, steps: int, nodes: int = 1, processes: int | None = None) -> list[Node]:
        """Start the request's container on fresh machines: without what an earlier start left on its disk."""
        place = self._folder / f"start-{number}"
        place.mkdir()
        crew = self._stack.enter_context(machines(place, nodes))
        for path in self._spec.parent.glob("*.py"):
            shutil.copy(path, place)
        if not self._needs_tensorflow:  # as in an image with this spec's requirements: tensorboard would import it
            (place / "tensorflow.py").write_text("raise ImportError\n")
        container = self._request["containerSpec"]
        env = {entry["name"]: entry["value"].replace("$$(", "$(") for entry in container["env"]}
        env |= {"LAUNCH_RUN_FOLDER": str(self.run_folder), "HOME": str(place), "OMP_NUM_THREADS": "1", **BYTECODE}
        if processes is not None:
            env["LAUNCH_PROCESSES"] = str(processes)
        return [crew.start(*container["args"], "--", f"--steps={steps}", node=node, env=env) for node in range(nodes)]

    def await_save(self, framework: Framework, node: Node, after: float = 0) -> None:
        """Wait until the script has saved, `after` this time (Unix seconds)."""
        until(
            lambda: (
                any(path.stat().st_mtime > after for path in self.run_folder.glob(framework.saved))
                or node.process.poll() is not None
            ),
            f"{framework.saved} in the run folder",
        )

    def kill_script(self, framework: Framework, node: Node) -> None:
        """Kill the script's process, and wait until the restarted one has saved and the node has been monitored."""
        (script,) = [pid for pid in descendants(node.process.pid) if runs_the_script(pid)]
        os.kill(script, signal.SIGKILL)
        node.await_text("restarting")
        self.await_save(framework, node, after=time.time())
        time.sleep(FIRST_SECONDS)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    with ExitStack() as stack:
        yield lambda name: Job(name, tmp_path, stack)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_it_is_preempted_and_resumes(job: Callable[[str], Job], framework: Framework) -> None:
    this = job(framework.name)
    (first,) = this.start(1, ENDLESS)
    this.await_save(framework, first)
    if framework.killed:
        this.kill_script(framework, first)
    first.send(signal.SIGTERM)
    assert first.wait() == framework.code, first.text
    stopped_at = max(trials.read(this.run_folder).starts[-1].records)
    steps = (stopped_at // SAVED_EVERY + 2) * SAVED_EVERY
    (second,) = this.start(2, steps, processes=None if framework.killed else framework.processes)
    assert second.wait() == Exit.OK, second.text
    check_rows(this.run_folder, framework, stopped_at, steps)
    for kept in ("text/*.log", "monitor/*.jsonl", "nodes/0000.json"):
        assert any(this.run_folder.glob(kept)), kept
    if framework.name == "hf-trainer":
        assert len([*this.run_folder.glob("logs/script/events.out.tfevents.*")]) == 2, "one event file of each start"


def check_rows(run: Path, framework: Framework, stopped_at: int, steps: int) -> None:
    """The second start must have gone on from a checkpoint, and the rows of both must leave no gap. So must a process
    that was restarted in place have; the rows of the killed one's last 3 s are lost."""
    *_, first, second = (start.records for start in trials.read(run).starts)
    assert framework.every < min(second) <= stopped_at + framework.every
    began = min(first)
    assert (began > framework.every) == framework.killed, (
        "a restarted process begins at a checkpoint, the first one from scratch"
    )
    assert sorted(first.keys() | second.keys()) == list(range(began, steps + 1, framework.every))
    assert second[steps]["loss"] < first[began]["loss"]


def runs_the_script(pid: int) -> bool:
    try:
        return b"--steps=" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False


BEATS = """\
import threading, time
ready = threading.Event()
def beat():
    while not ready.wait(0.2):
        print("importing", flush=True)
threading.Thread(target=beat).start()
"""
"""An import that takes seconds is no hang: its stacks would be those of the import system."""


@pytest.mark.parametrize("work", ["tensorflow as tf; tf.ones(3)", "jax; jax.numpy.ones(3)", "sklearn"])
def test_a_hang_is_noticed_and_its_stacks_are_kept(tmp_path: Path, work: str) -> None:
    text = f"{BEATS}import {work}\nready.set()\nprint('ready', flush=True)\ntime.sleep(300)\n"
    with machines(tmp_path) as crew:
        env = {"LAUNCH_HANG_AFTER": "4", "LAUNCH_RESTARTS": "0", **BYTECODE}
        node = crew.start("--launcher", "python", "--script", crew.script(text), env=env)
        assert node.wait() == Exit.FAILED, node.text
        (stacks,) = (crew.run_folder / "stacks").iterdir()
        assert "work.py" in stacks.read_text()


@pytest.mark.parametrize(("name", "words"), [("keras", "on 2 replicas"), ("jax", "on 2 devices")])
def test_two_nodes_train_together(job: Callable[[str], Job], name: str, words: str) -> None:
    this = job(name)
    nodes = this.start(1, 40, nodes=2)
    assert [node.wait() for node in nodes] == [Exit.OK, Exit.OK], nodes[0].text + nodes[1].text
    assert words in nodes[0].text
    assert sorted(trials.losses(this.run_folder)) == list(range(1, 41))

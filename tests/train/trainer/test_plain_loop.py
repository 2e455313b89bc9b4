"""The built-in trainer learns what a loop written by hand learns, to the last bit."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import plain_loop
from benchmarks.plain_loop import Job
from launch_train.common import contract
from launch_train.common.config import Gpt, parse
from launch_train.distributed import process_group as ranked
from launch_train.distributed.process_group import Ranks
from launch_train.trainer import train
from tests.train import meeting, trials

STEPS = 20


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_bytes(Path(json.__file__).read_bytes() * 4)
    return Job(text, steps=STEPS, shape=Gpt(n_layer=2, n_head=2, n_embd=32, block_size=32), batch_size=8)


def as_config(job: Job) -> dict[str, Any]:
    """The job in the trainer's words."""
    shape = {key: getattr(job.shape, key) for key in ("n_layer", "n_head", "n_embd", "block_size")}
    optimizer = {key: getattr(job, key) for key in ("lr", "min_lr", "warmup_steps", "weight_decay", "grad_clip")}
    return {
        "model": {"name": "gpt", **shape},
        "data": str(job.text),
        "steps": job.steps,
        "batch_size": job.batch_size,
        "optimizer": optimizer,
        "seed": job.seed,
        "eval": {"every": 0},
    }


def test_one_process(job: Job, tmp_path: Path, one_thread: None) -> None:
    train.train(parse(as_config(job)), Ranks(), {contract.RUN_FOLDER: str(tmp_path)})
    torch.use_deterministic_algorithms(False)
    theirs = plain_loop.train(job)
    assert list(trials.losses(tmp_path).values()) == theirs
    assert theirs[-1] < theirs[0] - 0.5
    assert len(theirs) == STEPS


@pytest.mark.parametrize("change", [{"lr": 1.1e-3}, {"grad_clip": 0.5}, {"weight_decay": 0.2}, {"seed": 1338}])
def test_each_setting_counts(job: Job, one_thread: None, change: dict[str, Any]) -> None:
    """A loop that ignored one of them would not notice: the comparison can fail."""
    assert plain_loop.train(Job(**{**vars(job), **change})) != plain_loop.train(job)


def test_two_ranks(job: Job, tmp_path: Path) -> None:
    _on_two_ranks(_trainer, as_config(job), str(tmp_path / "run"))
    _on_two_ranks(_plain, job, str(tmp_path / "plain"))
    theirs = [json.loads((tmp_path / f"plain.{rank}").read_text()) for rank in (0, 1)]
    assert list(trials.losses(tmp_path / "run").values()) == [(a + b) / 2 for a, b in zip(*theirs, strict=True)]
    assert theirs[0] != theirs[1]


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["launch_train.trainer.train", "torch._dynamo", "tests.train.trainer.test_plain_loop"])


def _on_two_ranks(work: Any, job: Any, out: str) -> None:
    with meeting.ranks(2) as places:
        processes = [_CONTEXT.Process(target=work, args=(place, job, out)) for place in places]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def _trainer(env: dict[str, str], config: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    ranks = ranked.join(env)
    train.train(parse(config), ranks, env | {contract.RUN_FOLDER: out})
    ranked.finish(ranks)


def _plain(env: dict[str, str], job: Job, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(f"{out}.{rank}").write_text(json.dumps(plain_loop.train(job, rank, 2)))
    dist.barrier()
    os._exit(0)

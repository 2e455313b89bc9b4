"""A training script as a user writes it, started in processes of its own that may be told to stop, or killed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch_train import checkpoint, metrics
from launch_train.common import contract
from tests.train import meeting

STEPS = 12
NOTHING: Mapping[str, str] = MappingProxyType({})


class Blow(NamedTuple):
    """What befalls a rank in the middle of a step."""

    step: int
    signum: int = signal.SIGTERM
    rank: int = 0


def script(blow: Blow | None, *, ddp: bool = False, every: float = 1e-6) -> None:
    """Dropout, batch norm, a schedule, a generator, values that aren't tensors: all that a state can have."""
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(7)
    random.seed(8 + rank)
    np.random.seed(9 + rank)
    bare = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    model = DistributedDataParallel(bare) if ddp else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    draws = torch.Generator().manual_seed(1 + rank)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    own: dict[str, Any] = {"draws": draws, "last": rank}
    state |= {"seen": 0, "table": np.zeros((2, 3), np.float32), "raw": b"", "best": torch.tensor(9.0)}
    for step in range(checkpoint.restore(state, own=own, minutes=every) + 1, STEPS + 1):
        if blow and blow.step == step and blow.rank == rank:
            _under_way()
            os.kill(os.getpid(), blow.signum)
        x = torch.randn(6, 8, generator=draws) + random.random() + float(np.random.rand())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        own["last"] += 1
        state["seen"] += len(x)
        state["table"] = state["table"] + np.float32(step)
        state["raw"] += bytes([step])
        state["best"] = torch.minimum(state["best"], loss.detach())
        metrics.log(step, loss=loss.item())
        if checkpoint.due(step):
            checkpoint.save(step, state, own=own)
        if checkpoint.preempted():
            checkpoint.leave()
    checkpoint.save(STEPS, state, own=own, wait=True)
    if not ddp:
        note(state)


def _under_way() -> None:
    """Wait for the save that is: a blow finds one checkpoint there, if there can be one."""
    from launch_train.script_api import session as script

    if script._script:
        script._script.finish(30)


def note(state: Mapping[str, Any]) -> None:
    """What the script came to, beside the run folder."""
    parameters = b"".join(value.numpy().tobytes() for value in state["model"].state_dict().values())
    digest = hashlib.sha256(parameters).hexdigest()
    values = (digest, state["seen"], state["table"].tolist(), state["raw"], state["best"].item(), torch.rand(1).item())
    Path(f"{os.environ[contract.RUN_FOLDER]}.end").write_text(repr(values))


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["launch_train.script_api.session", "tests.train.script_api.user_script", "torch._dynamo"]
)


def _child(env: Mapping[str, str], blow: Blow | None, ddp: bool, every: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    if ddp:
        torch.distributed.init_process_group("gloo")
    script(blow, ddp=ddp, every=every)
    if ddp:
        torch.distributed.destroy_process_group()
    metrics._default().close()
    os._exit(0)


def start(env: Mapping[str, str], blow: Blow | None = None, *, ranks: int = 1, every: float = 1e-6) -> list[int | None]:
    """The script's ranks, side by side; their exit codes. A rank that has failed takes the others with it."""
    processes: list[ForkServerProcess] = []
    with meeting.ranks(ranks) as places:
        for place in places:
            own = place if ranks > 1 else {}
            processes.append(CONTEXT.Process(target=_child, args=({**env, **own}, blow, ranks > 1, every)))
            processes[-1].start()
        for process in processes:
            process.join(60)
            if process.exitcode not in (0, 75):
                for other in processes:
                    other.kill()
    return [process.exitcode for process in processes]


def _speak(env: Mapping[str, str], text: str, out: str, err: str) -> None:
    os.environ.update(env)
    sys.argv = ["script.py"]
    for name, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
    exec(text, {"__name__": "__main__"})


class Said(NamedTuple):
    """How a script in text ended, and what it said."""

    code: int | None
    out: str
    err: str


def run(text: str, folder: Path, generation: int = 0, more: Mapping[str, str] = NOTHING) -> Said:
    """A script in text, in a separate process."""
    return _spoken(text, folder, environment(folder, generation, more), [{}])[0]


def run_ranks(text: str, folder: Path, generation: int = 0, ranks: int = 2) -> list[Said]:
    """The same on several ranks, which join by gloo. `rank` is known to the text. As under torchrun a rank that fails
    takes the others with it; -9 is the code of one that would have waited for ever."""
    joining = "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
    leaving = "\ndist.barrier(); dist.destroy_process_group()\n"
    with meeting.ranks(ranks) as places:
        return _spoken(joining + text + leaving, folder, environment(folder, generation), places)


def _spoken(
    text: str, folder: Path, env: Mapping[str, str], places: Sequence[Mapping[str, str]], seconds: float = 60
) -> list[Said]:
    names = [f"{folder}.{env[contract.GENERATION]}.{place.get('RANK', '')}" for place in places]
    processes = [
        CONTEXT.Process(target=_speak, args=({**env, **place}, text, f"{name}out", f"{name}err"))
        for place, name in zip(places, names, strict=True)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join()
    said = [[Path(f"{name}{stream}").read_text() for stream in ("out", "err")] for name in names]
    return [Said(process.exitcode, *texts) for process, texts in zip(processes, said, strict=True)]


def environment(folder: Path, generation: int = 0, more: Mapping[str, str] = NOTHING) -> dict[str, str]:
    return {
        contract.RUN_FOLDER: str(folder),
        contract.ATTEMPT: "1",
        contract.GENERATION: str(generation),
        contract.EXIT_FILE: f"{folder}.exit",
        **more,
    }

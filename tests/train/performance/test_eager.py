"""A run that compiles nothing doesn't load the compiler, and loads it without harm later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from launch_train.performance import eager
from tests.train import meeting

CODE = """
import json, os, sys
from launch_train.distributed import process_group as dist
from launch_train.trainer import train as loop
from launch_train.common.config import parse
ranks = dist.join(os.environ)
loop.train(parse(json.loads(os.environ["LAUNCH_CONFIG"])), ranks, os.environ)
print("compiler:", [name for name in ("torch._dynamo", "sympy") if name in sys.modules])
import torch
print("compiled:", torch.compile(lambda x: x + 1, backend="eager")(torch.ones(())).item())
dist.finish(ranks)
"""
CONFIG = {
    "model": {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8},
    "data": "synthetic",
    "steps": 3,
    "batch_size": 2,
    "eval": {"every": 3, "batches": 2},
}


@pytest.mark.slow
def test_neither_in_one_process_nor_in_ddp(tmp_path: Path) -> None:
    with meeting.ranks(2) as places:
        processes = [_started(tmp_path / str(number), env) for number, env in enumerate(({}, *places))]
        for process in processes:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            assert "compiler: []\ncompiled: 2.0" in out
    assert len(list(tmp_path.rglob("LATEST"))) == 2, "to save is to read the optimizer's state"


def _started(folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    run = folder if env.get("RANK") != "1" else folder.with_name("1")  # ranks share theirs
    told = {"LAUNCH_CONFIG": json.dumps(CONFIG), "LAUNCH_RUN_FOLDER": str(run), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", CODE], env={**os.environ, **told, **env}, stdout=-1, text=True)


def test_the_optimizer_is_torchs_in_all_but_its_compiler() -> None:
    def trained(kind: type[torch.optim.Optimizer]) -> tuple[list[float], dict[str, object]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        made = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]  # each kind has a rate
        called: list[object] = []
        made.register_step_post_hook(lambda *_: called.append(torch.is_grad_enabled()))
        for _ in range(3):
            made.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            made.step()
        assert len(called) == 3
        again = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]  # each kind has a rate
        again.load_state_dict(made.state_dict())
        return model.weight.flatten().tolist(), again.state_dict()["param_groups"][0]

    for kind in (torch.optim.AdamW, torch.optim.SGD):
        ours = eager.eager_optimizer(kind)
        assert ours.__name__ == kind.__name__
        assert trained(ours) == trained(kind)


def test_what_the_compiler_was_told_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ModuleType("told")
    monkeypatch.setitem(vars(torch), "_dynamo", told)
    with eager._without_dynamo():
        assert torch._dynamo is told
    assert torch._dynamo is told

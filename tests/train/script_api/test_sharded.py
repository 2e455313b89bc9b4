"""Custom scripts whose states hold DTensors: fully_shard (FSDP2) on two ranks over gloo, resumed on any number."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch_train import checkpoint
from launch_train.common.storage import LocalFolder
from tests.train import trials
from tests.train.script_api.user_script import Said, run_ranks

SHARDED = """
from torch.distributed.fsdp import fully_shard
from launch_train import checkpoint, metrics
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
ema = [parameter.detach().clone() for parameter in model.parameters()]
if SHARD:
    fully_shard(model[0]), fully_shard(model)
    ema = [parameter.detach().clone() for parameter in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "ema": ema}
start = checkpoint.restore(state, minutes=60)
for step in range(start + 1, STEPS + 1):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, parameter in zip(state["ema"], model.parameters()):
            mean.lerp_(parameter, 0.5)
    metrics.log(step, loss=loss.item())
print(start, type(next(model.parameters())).__name__, type(state["ema"][0]).__name__, len(optimizer.state))
if STEPS > start:
    checkpoint.save(STEPS, state, wait=True)
metrics._default().close()
"""
"""All ranks draw the same batch, so that one rank comes to the losses of two but for rounding."""


def train(folder: Path, steps: int, generation: int = 0, *, ranks: int = 2, shard: bool = True) -> list[Said]:
    text = SHARDED.replace("STEPS", str(steps)).replace("SHARD", str(shard))
    said = run_ranks(text, folder, generation, ranks)
    assert [one.code for one in said] == [0] * ranks, said
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on two ranks."""
    folder = tmp_path_factory.mktemp("sharded") / "whole"
    train(folder, 6)
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first 3 steps."""
    folder = tmp_path_factory.mktemp("sharded") / "half"
    train(folder, 3)
    return folder


def test_each_rank_saves_its_own_part(half: Path) -> None:
    """The two parts of every tensor, 7 rows as 4 and 3, make up the whole, which any program can read."""
    names = LocalFolder(half).list("checkpoints/step-00000003")
    assert len([name for name in names if "/rank-" in name]) == 2
    saved = checkpoint.load(str(half))
    assert saved["model"]["0.weight"].shape == (7, 5)
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == (7, 5)
    assert [tensor.shape for tensor in saved["ema"]] == [value.shape for value in saved["model"].values()]


def test_it_resumes_on_two_ranks_to_the_last_bit(whole: Path, half: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(half, tmp_path / "run"))
    said = train(folder, 6, 1)
    assert said[0].out.splitlines()[-1] == "3 DTensor DTensor 4"
    assert trials.losses(folder) == trials.losses(whole)
    one, other = (checkpoint.load(str(place)) | {"ranks": None} for place in (folder, whole))
    assert trials.flat(one) == trials.flat(other)


@pytest.mark.parametrize("shard", [True, False])
def test_it_resumes_on_one_rank(whole: Path, half: Path, tmp_path: Path, shard: bool) -> None:
    """Sharded over one rank, or not at all: the script says what it has."""
    folder = Path(shutil.copytree(half, tmp_path / "run"))
    said = train(folder, 6, 1, ranks=1, shard=shard)
    kind = "DTensor DTensor" if shard else "Parameter Tensor"
    assert said[0].out.splitlines()[-1] == f"3 {kind} 4"
    assert trials.losses(folder) == pytest.approx(trials.losses(whole), rel=1e-5)


def test_what_was_whole_is_sharded_when_it_is_resumed(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, 3, ranks=1, shard=False)
    assert train(folder, 6, 1)[1].out.splitlines()[-1] == "3 DTensor DTensor 4"
    assert trials.losses(folder) == pytest.approx(trials.losses(whole), rel=1e-5)


@pytest.mark.parametrize(
    ("state", "own", "where"),
    [
        ("{'it': distribute_tensor(torch.ones(4), mesh, [Replicate()])}", "{}", "state['it']"),
        ("{}", "{'it': distribute_tensor(torch.ones(4), mesh, [Shard(0)])}", "own['it']"),
    ],
)
def test_what_cannot_be_saved_of_it_is_refused_at_restore(tmp_path: Path, state: str, own: str, where: str) -> None:
    text = "from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh\n"
    text += "from launch_train import checkpoint\nmesh = init_device_mesh('cpu', (2,))\n"
    said = run_ranks(f"{text}checkpoint.restore({state}, own={own})", tmp_path / "run")
    assert [one.code for one in said] == [2, 2], said
    assert where in said[0].err
    assert len(said[0].err.splitlines()) == 1

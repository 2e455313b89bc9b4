"""Several ranks on the CPU: the same bits twice (once under torchrun), and the same losses on one rank and on two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train import checkpoint
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import DisagreementError
from launch_train.common.storage import LocalFolder
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
from launch_train.models import build_model
from launch_train.trainer import train
from launch_train.trainer.replica_check import parameters_sha256
from tests.train.conftest import on_one_thread
from tests.train.forked import ROOT, Forked
from tests.train.switches import RESNET

CONFIG: dict[str, Any] = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32},
    "steps": 12,
    "batch_size": 8,
    "micro_batch_size": 2,
    "eval": {"every": 6, "batches": 2},
    "log_every": 5,
}


def environment(folder: Path, config: dict[str, Any], path: str = str(ROOT)) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        contract.RUN_FOLDER: str(folder),
        contract.CONFIG: json.dumps(config),
        contract.EXIT_FILE: f"{folder}.exit",
    }


def start(env: dict[str, str], ranks: int) -> subprocess.CompletedProcess[str]:
    """`torchrun -m launch_train` with so many processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*torchrun, "-m", "launch_train"], env=env, capture_output=True, text=True, timeout=120, check=False
    )


def by_hand(env: dict[str, str], *own: dict[str, str]) -> list[subprocess.Popen[str]]:
    """A rank for each environment of its own, without torchrun, which would end the others with the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(own))}
    ranks = [{**env, **mine, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank, mine in enumerate(own)]
    return [
        subprocess.Popen([sys.executable, "-m", "launch_train"], env=rank, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]


def losses(folder: Path) -> tuple[list[float], list[float], dict[str, Any]]:
    """Of the steps and of the evaluations, and the end event."""
    storage = LocalFolder(folder)
    rows = [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]
    evals = [row["loss"] for row in rows if row.get("event") == "eval"]
    (end,) = [row for row in rows if row.get("event") == "end"]
    return [row["loss"] for row in rows if "event" not in row], evals, end


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> dict[str, Path]:
    """Twice on two ranks, under torchrun and without it; once on one, in this process. The data is a small folder of
    source."""
    base = tmp_path_factory.mktemp("runs")
    config = {**CONFIG, "data": str(Path(json.__file__).parent)}
    two, again = start(environment(base / "two", config), 2), forked(environment(base / "again", config), 2)
    assert (two.returncode, again.returncode) == (0, 0), two.stderr + again.stderr
    (base / "two.out").write_text(two.stdout)
    with on_one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        train.train(parse(config), Ranks(), {contract.RUN_FOLDER: str(base / "one")})
    return {name: base / name for name in ("two", "again", "one")}


@pytest.mark.slow(turn=0)
def test_the_same_seed_and_ranks_give_the_same_bits(runs: dict[str, Path]) -> None:
    two, again = losses(runs["two"]), losses(runs["again"])
    assert two[:2] == again[:2]
    assert two[2]["parameters_sha256"] == again[2]["parameters_sha256"]
    assert len(two[0]) == 12
    assert Path(f"{runs['two']}.out").read_text().count("all 2 ranks agree") == 1
    assert Path(f"{runs['two']}.exit").read_text().split() == ["0", "0"]


@pytest.mark.slow(turn=0)
def test_the_number_of_ranks_changes_nothing_but_the_rounding(runs: dict[str, Path]) -> None:
    two, one = losses(runs["two"]), losses(runs["one"])
    assert (two[2]["world_size"], one[2]["world_size"]) == (2, 1)
    assert two[0] == pytest.approx(one[0], abs=2e-4)
    assert two[1] == pytest.approx(one[1], abs=2e-4)
    assert two[2]["data_sha256"] == one[2]["data_sha256"]


def test_a_users_error_is_one_line_and_the_same_code_on_every_rank(tmp_path: Path, forked: Forked) -> None:
    """Apart: torchrun would end the second rank before it can say how it ends."""
    done = forked(environment(tmp_path / "run", {**CONFIG, "data": str(tmp_path / "nothing")}), 2, apart=True)
    assert done.errors == [f"train: data: {tmp_path / 'nothing'} does not exist on this machine\n", ""]
    assert done.codes == [2, 2]
    assert Path(f"{tmp_path / 'run'}.exit").read_text().split() == ["2", "2"]


@pytest.mark.slow(turn=0)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_disagree_say_so_and_save_nothing(switches: Path, rank: int) -> None:
    """A rank whose parameters are changed behind the back of DDP before the end."""
    assert (switches / f"disagreed-{rank}").read_text().startswith("the ranks' parameters differ at the end")
    assert LocalFolder(switches / "disagreed").list("checkpoints/step") == []
    assert DisagreementError.exit == 76


def test_an_error_that_only_another_rank_has_is_said_by_it(tmp_path: Path, forked: Forked) -> None:
    hook = f"import os\nif os.environ['RANK'] == '1': os.environ['{contract.RUN_FOLDER}'] = 's3://bucket'"
    done = forked(environment(tmp_path / "run", {**CONFIG, "data": "synthetic"}), 2, hook=hook)
    assert done.errors[1] == "train: invalid run folder s3://bucket: use gs://BUCKET/PATH or a local folder\n"
    assert done.codes[1] == contract.Exit.UNFIT


def test_a_last_checkpoint_may_take_longer_than_a_collective(tmp_path: Path, forked: Forked) -> None:
    hook = (
        "import time, datetime\n"
        "from launch_train.checkpointing import manifest\n"
        "from launch_train.distributed import process_group\n"
        "process_group.TIMEOUT, commit = datetime.timedelta(seconds=3), manifest.commit\n"
        "manifest.commit = lambda *a: (time.sleep(4), commit(*a))[1]\n"
    )
    done = forked(environment(tmp_path / "run", {**CONFIG, "data": "synthetic", "steps": 2}), 2, hook=hook)
    assert done.returncode == 0, done.stderr
    assert LocalFolder(tmp_path / "run").list("checkpoints/")


@pytest.mark.slow(turn=0)
def test_the_held_out_loss_is_that_of_the_saved_model(switches: Path) -> None:
    """Each rank's batch norm has seen other images; what is evaluated and saved is one model."""
    folder, parsed = switches / "resnet", parse(RESNET)
    _, evals, end = losses(folder)
    state = checkpoint.load(str(folder), 4)
    saved = build_model(parsed)
    saved.load_state_dict(state["model"])
    assert parameters_sha256(saved, Ranks()) == end["parameters_sha256"]
    saved.eval()
    batches = [open_data(parsed, Ranks()).held_out(index, 2, slice(0, 8)) for index in (0, 1)]
    with torch.no_grad():
        assert evals[-1] == pytest.approx(sum(saved(x, y).item() for x, y in batches) / 2, rel=1e-4)

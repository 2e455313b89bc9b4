"""Several ranks that are told to stop, through torchrun and without it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from tests.train.forked import ROOT, Forked
from tests.train.trainer.test_determinism import by_hand, environment, start
from tests.train.trials import differences, losses, read

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "dropout": 0.1},
    "data": "synthetic",
    "steps": 20,
    "batch_size": 16,
    "micro_batch_size": 2,
    "optimizer": {"lr": 1e-2, "warmup_steps": 10},
    "eval": {"every": 6, "batches": 2},
    "log_every": 5,
}
HOOK = """
import os, signal, time
import launch_train.distributed.consensus, launch_train.performance.optimizer, launch_train.trainer.build
launch_train.distributed.consensus.VOTE_SECONDS = 0.0  # the run is over in less
real = launch_train.performance.optimizer.learning_rate
def learning_rate(step, *rest):
    if step > int(os.environ['STOP_AT']):
        time.sleep(1)  # else all is over before torchrun has passed a signal on
    if step == int(os.environ['STOP_AT']) and os.environ.get('RANK', '0') == os.environ['STOP_RANK']:
        exec(os.environ['STOP_HOW'])
    return real(step, *rest)
launch_train.performance.optimizer.learning_rate = learning_rate
"""
"""Does STOP_HOW in the rank STOP_RANK when it begins the step STOP_AT."""

LATE = f"""
import os, sys
class Late:
    def find_spec(self, name, path=None, target=None):
        if name == 'launch_train.trainer.train' and os.environ.get('STOP_AT'):
            exec({HOOK!r}, {{}})
sys.meta_path.insert(0, Late())
"""
"""HOOK as soon as a process imports the trainer."""


def hooked(folder: Path, step: int = 0, rank: int = 0, how: str = "", **config: Any) -> dict[str, str]:
    folder.parent.mkdir(exist_ok=True)
    (folder.parent / "sitecustomize.py").write_text(LATE)
    env = environment(folder, {**CONFIG, **config}, f"{folder.parent}:{ROOT}")
    return env | {"STOP_AT": str(step or ""), "STOP_RANK": str(rank), "STOP_HOW": how}


TERM_TORCHRUN = "os.kill(os.getppid(), signal.SIGTERM)"
TERM_SELF = "os.kill(os.getpid(), signal.SIGTERM)"


def test_torchrun_is_told_to_stop_and_the_next_start_goes_on(tmp_path: Path, forked: Forked) -> None:
    """With four ranks the order of additions depends on DDP's buckets, which change after the first step."""
    chosen: dict[str, Any] = {"micro_batch_size": "auto"}
    whole = forked(hooked(tmp_path / "whole", **chosen), 4)
    assert whole.returncode == 0, whole.stderr
    often = {**chosen, "checkpoint": {"minutes": 1e-6, "keep": {"last": 2}}}
    first = start(hooked(tmp_path / "run", step=9, rank=1, how=TERM_TORCHRUN, **often), 4)
    assert first.returncode != 0
    assert set(Path(f"{tmp_path / 'run'}.exit").read_text().split()) == {"75"}, first.stderr
    stopped = read(tmp_path / "run").event("preempted")
    assert stopped is not None
    assert 9 <= stopped["step"] < 20
    assert first.stderr.count("train: preempted: checkpoint saved") == 1
    again = forked(hooked(tmp_path / "run", **chosen), 4)
    assert again.returncode == 0, again.stderr
    assert f"resumed from step {stopped['step']}" in again.stdout
    assert differences(tmp_path / "whole", tmp_path / "run") == set()
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")


def test_another_number_of_ranks_goes_on_within_rounding(tmp_path: Path, forked: Forked) -> None:
    calm: dict[str, Any] = {"model": {**CONFIG["model"], "dropout": 0.0}}
    whole = forked(hooked(tmp_path / "whole", **calm), 2)
    assert whole.returncode == 0, whole.stderr
    assert forked(hooked(tmp_path / "run", step=9, how=TERM_SELF, **calm), 2, hook=HOOK, apart=True).codes == [75, 75]
    again = forked(hooked(tmp_path / "run", **calm), 1)
    assert again.returncode == 0, again.stderr
    assert "ranks: 2 before, 1 now: same global batch and data order" in again.stdout
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=2e-4)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_dead_peer_does_not_hold_the_others(tmp_path: Path, how: str) -> None:
    """The peer dies (or hangs, as NCCL does without its peer) in a step; then the other is told to leave."""
    dying = f"os.kill(os.getpid(), signal.{how})"
    env = hooked(tmp_path / "run", step=5, rank=1, how=dying) | {contract.NOTICE: str(tmp_path / "never")}
    survivor, peer = by_hand(env, {}, {})
    try:
        _until_it_dies(peer, how)
        began = time.monotonic()
        survivor.send_signal(signal.SIGTERM)
        survivor.wait(timeout=60)
        assert time.monotonic() - began < 25  # 5 s of its own, far below the 30 s after which it would be killed
        assert survivor.returncode in (143, 1, -signal.SIGTERM)
    finally:
        for process in (survivor, peer):
            process.kill()
            process.communicate()
    assert {row["step"] for row in read(tmp_path / "run").rows} <= set(range(1, 6))


def _until_it_dies(peer: subprocess.Popen[str], how: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == ("T" if how == "SIGSTOP" else "Z"):
            return
        time.sleep(0.05)
    raise AssertionError("the peer still runs")


def test_a_peers_failure_is_no_preemption(tmp_path: Path, forked: Forked) -> None:
    """SIGTERM without the node's notice: nothing is saved, as a rank may be missing; with it, all is."""
    notice = tmp_path / "notice"
    for given, code, kept in ((False, 143, 0), (True, 75, 1)):
        if given:
            notice.write_text(f"{time.time()}")
        env = hooked(tmp_path / f"run-{given}", step=5, how=TERM_SELF) | {contract.NOTICE: str(notice)}
        assert forked(env, hook=HOOK).codes == [code]
        names = [path.name for path in (tmp_path / f"run-{given}").rglob("manifest.json")]
        assert len(names) == kept


def test_two_starts_at_once_one_wins(tmp_path: Path, forked: Forked) -> None:
    """Both believe to be the same start: one trains to the end, the other leaves with its own code and one line."""
    env = hooked(tmp_path / "run") | {contract.ATTEMPT: "1", contract.GENERATION: "0"}
    both = forked.together((env, 1), (env, 1))
    assert sorted(one.returncode for one in both) == [0, contract.Exit.SUPERSEDED]
    loser = next(one.stderr for one in both if one.returncode)
    assert "another process writes this run as the same start (0001-0000)" in loser
    assert "Traceback" not in loser


def test_what_a_preempted_start_leaves(tmp_path: Path, forked: Forked) -> None:
    assert forked(hooked(tmp_path / "run", step=3, how=TERM_SELF), hook=HOOK).codes == [75]
    rows = [json.loads(line) for path in (tmp_path / "run/metrics").iterdir() for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows if "event" in row] == ["start", "preempted", "checkpoint"]
    assert [row["step"] for row in rows if "event" not in row] == [1, 2, 3]
    assert (tmp_path / "run" / runfolder.LATEST).exists()

"""What ranks do together, over a store in memory; the collectives run in test_determinism.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from launch_train.common import contract
from launch_train.common.errors import TrainError, UnfitError, UsageError
from launch_train.distributed import process_group
from launch_train.distributed.process_group import Ranks, barrier, run_once_per_node, should_report


def pair() -> tuple[Ranks, Ranks]:
    store = HashStore()
    return Ranks(0, 2, 0, store=store), Ranks(1, 2, 1, store=store)


def run_all(*works: Callable[[], object]) -> None:
    threads = [Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_gpus_that_torch_can_not_use_are_never_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnfitError, match=r"this node has 2 GPUs \(nvidia-smi\), but torch .* can't use them"):
        process_group.join({contract.VISIBLE_GPUS: "2"})
    for seen in ("0", ""):
        assert process_group.join({contract.VISIBLE_GPUS: seen}).device == torch.device("cpu")


def test_a_process_without_a_gpu_of_its_own_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnfitError, match="process 1 of this node has no GPU: only 1"):
        process_group.join({"LOCAL_RANK": "1", contract.VISIBLE_GPUS: "1"})


@pytest.mark.parametrize(("gb", "fraction"), [("20", 0.25), ("12.5", 0.15625), ("81", 1.0), ("", None)])
def test_a_memory_limit_is_a_fraction_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, gb: str, fraction: float | None
) -> None:
    found: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: found.append(share))
    process_group.limit_memory(torch.device("cuda", 1), {contract.GPU_MEMORY: gb})
    process_group.limit_memory(torch.device("cpu"), {contract.GPU_MEMORY: gb})
    assert found == ([] if fraction is None else [fraction])


@pytest.mark.parametrize("gb", ["0", "-1", "much", "nan"])
def test_a_bad_memory_limit_is_refused_in_words(gb: str) -> None:
    with pytest.raises(UsageError, match=r"machine\.gpu_memory_gb"):
        process_group.limit_memory(torch.device("cuda", 0), {contract.GPU_MEMORY: gb})


def test_ranks_wait_for_each_other_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.01)
    first, second = pair()
    said: list[str] = []

    def late() -> None:
        for number in (1, 2):
            time.sleep(0.1)
            said.append(f"late {number}")
            barrier(second)

    def early() -> None:
        for number in (1, 2):
            barrier(first)
            said.append(f"met {number}")

    run_all(late, early)
    assert said == ["late 1", "met 1", "late 2", "met 2"]
    barrier(Ranks())  # alone: nobody to wait for


def test_the_timeout_of_all_process_groups_is_raised() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=process_group.TIMEOUT)
    try:
        groups = [
            torch.distributed.group.WORLD,
            torch.distributed.new_group(backend="gloo", timeout=process_group.TIMEOUT),
        ]
        process_group.raise_timeout(timedelta(hours=2))
        for group in groups:
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(hours=2)
    finally:
        torch.distributed.destroy_process_group()
    process_group.raise_timeout(timedelta(hours=2))  # alone: no group


@pytest.mark.parametrize(("world", "here", "nodes"), [("4", "2", 2), ("2", "2", 1), ("1", "1", 1)])
def test_how_many_nodes_take_part(monkeypatch: pytest.MonkeyPatch, world: str, here: str, nodes: int) -> None:
    monkeypatch.setattr(process_group, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, int(world))]))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    assert process_group.join({"RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here}).nodes == nodes


def test_who_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "BARRIER_SECONDS", 0.05)
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.01)
    with pytest.raises(TrainError, match="not all ranks arrived"):
        barrier(pair()[0])


def test_rank_0_speaks_and_else_the_first_that_has_something_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "REPORT_SECONDS", 10.0)
    one, other = TrainError("it is full"), TrainError("it is broken")
    spoke: dict[str, bool] = {}
    first, second = pair()
    run_all(
        lambda: spoke.update(zero=should_report(first, one)), lambda: spoke.update(one=should_report(second, other))
    )
    assert spoke == {"zero": True, "one": False}
    monkeypatch.setattr(process_group, "REPORT_SECONDS", 0.05)
    first, second = pair()
    assert [should_report(rank, one) for rank in (second, second)] == [True, False]
    assert not should_report(first, one), "in the same words"
    assert should_report(first, other)
    assert should_report(None, one)


@pytest.mark.parametrize("module", ["launch_train", "launch_train.bench"])
def test_a_torch_that_cant_be_loaded_is_told_once(tmp_path: Path, module: str) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    path = os.pathsep.join([str(tmp_path), str(Path(process_group.__file__).parents[1])])
    env = os.environ | {"PYTHONPATH": path, "RANK": "1"}
    argv = [sys.executable, "-m", module]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert (ran.returncode, ran.stderr.count("Traceback")) == (1, 1)
    assert ran.stderr.endswith("ImportError: libcudart is missing\n")


def test_what_torch_says_of_a_peer_that_has_gone_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "REPORT_SECONDS", 0.05)
    gone = RuntimeError("Connection closed by peer")
    for said in (TrainError("it is full"), ValueError("of the user's")):
        first, second = pair()
        assert should_report(second, said)
        assert not should_report(first, gone)
        assert should_report(first, KeyError("another error of the user's"))
    first, second = pair()
    assert should_report(first, gone), "nobody has said why"


def test_an_error_of_the_files_is_passed_on_too() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "/cache")

    with pytest.raises(TrainError, match="No space left on device: '/cache'"):
        run_once_per_node(Ranks(), full)


def test_nothing_keeps_a_process_that_leaves(tmp_path: Path) -> None:
    code = "import sys; from launch_train.common.process_exit import exit_process; sys.stdout.close(); exit_process(2)"
    env = {"PYTHONPATH": str(Path(contract.__file__).parents[2]), contract.EXIT_FILE: str(tmp_path / "no" / "exit")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("train: [Errno 2] No such file")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("nccl", "gloo"), [("lo", "lo"), ("=lo,eth1", "lo"), ("^lo", None), ("l", None), ("", None), (None, None)]
)
def test_gloo_takes_the_interface_that_nccl_was_given(nccl: str | None, gloo: str | None) -> None:
    environ = {} if nccl is None else {"NCCL_SOCKET_IFNAME": nccl}
    process_group._use_nccl_interface_for_gloo(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == gloo
    own = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "eth7"}
    process_group._use_nccl_interface_for_gloo(own)
    assert own["GLOO_SOCKET_IFNAME"] == "eth7"

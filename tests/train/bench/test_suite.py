"""The bench, measuring: each part in this process, and all of it as a program.

tests/cli/commands/test_bench.py has it on two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch_train import runfolder
from launch_train.bench import __main__ as program
from launch_train.bench import measure
from launch_train.bench.figures import PARTS, BenchFigure, Measured
from launch_train.bench.verdict import Report
from launch_train.common import contract
from launch_train.common.errors import OutputError, UnfitError, UsageError
from launch_train.distributed.process_group import Ranks

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def by_name(figures: list[BenchFigure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


# --- The parts --------------------------------------------------------------------------------------------------------


def test_products_and_copies_on_a_cpu() -> None:
    products = by_name(measure.matrix_products(CPU, 0.01, host=True, size=128))
    assert list(products) == ["matmul fp32", "matmul bf16"]
    assert all(1e-6 < value < 100 for value in products.values())
    copies = by_name(measure.memory_bandwidth(CPU, 0.01, size=1 << 22))
    assert list(copies) == ["memory copy", "memory triad"]
    assert all(0.05 < value < 5000 for value in copies.values())
    assert measure.host_copies(CPU, 0.01) == []


def test_a_products_operations_are_counted_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "median_seconds", lambda work, device, budget: work() is None or 1e-3)
    assert measure.tflops(CPU, "fp32", 100, 0.0) == pytest.approx(2 * 100**3 / 1e-3 / 1e12)
    copy, triad = measure.memory_bandwidth(CPU, 0.0, size=4000)
    assert [copy.value, triad.value] == pytest.approx([2 * 4000 / 1e-3 / 1e9, 3 * 4000 / 1e-3 / 1e9])


def test_the_bus_bandwidth_of_an_all_reduce_is_nccl_tests() -> None:
    assert [measure.bus_bytes(1000, ranks) for ranks in (2, 8)] == [1000, 1750]
    assert measure.all_reduce(Ranks(), (1,), 0.01) == []


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_in_the_ring_of_a_node_each_rank_receives_what_another_sends(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    ring, buffer = range(8, 8 + size), torch.empty(0)  # the second node's
    exchanged: list[tuple[str, int, int]] = []

    def exchange(both: list[tuple[str, int]]) -> list[Any]:
        exchanged.extend((work, peer, rank) for work, peer in both)
        return []

    monkeypatch.setattr(dist, "P2POp", lambda work, _, peer: (work.__name__, peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    for rank in ring:
        measure.pass_on(rank, ring, buffer, buffer)
    sent = {(rank, peer) for work, peer, rank in exchanged if work == "isend"}
    received = {(peer, rank) for work, peer, rank in exchanged if work == "irecv"}
    assert sent == received
    assert len(sent) == (size if size > 1 else 0)


def test_a_part_that_fails_is_noted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[BenchFigure]:
        raise RuntimeError("CUDA out of memory.\n  Tried to allocate 512 MiB")

    monkeypatch.setattr(measure, "memory_bandwidth", broken)
    heard: list[str] = []
    (found,) = measure.measure_all(Ranks(), ["memory", "host", "allreduce"], quick=True, env={}, say=heard.append)
    assert found.troubles == (("memory", "CUDA out of memory. Tried to allocate 512 MiB"),)
    assert (heard, list(found.seconds)) == (["memory", "host", "allreduce"],) * 2


# --- The command line -------------------------------------------------------------------------------------------------


def test_the_command_line() -> None:
    assert program.parse([]) == program.Options(PARTS)
    assert program.parse(["--only", "memory, matmul", "--quick"]).parts == ("matmul", "memory")
    for words in (["--only", "gpu"], ["--only="], ["--fast"], ["memory"], ["--json"]):
        with pytest.raises(UsageError):
            program.parse(words)


def test_strict_ends_with_unfit_after_all_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Measured(0, 0, 0, "h", "NVIDIA H200", (BenchFigure("matmul bf16", 300.0, "TFLOP/s"),))
    report = Report((slow,), {}, quick=True, torch="2", time=0.0, seconds=1.0)
    options = program.Options(strict=True, json=str(tmp_path / "it.json"))
    with pytest.raises(UnfitError, match="reaches 300 of 989: 30 %"):
        program.publish(options, report, {contract.RUN_FOLDER: str(tmp_path / "run")})
    kept = json.loads((tmp_path / "run" / runfolder.BENCH).read_text())
    assert kept == json.loads((tmp_path / "it.json").read_text())
    assert not kept["ok"]
    assert "TOO SLOW: GPU 0 of node 0: matmul bf16 reaches 300" in capsys.readouterr().out
    program.publish(options._replace(strict=False), report, {})


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Where that can be seen beforehand nothing is measured."""
    with pytest.raises(UsageError, match=r"^--json /no/such/folder/it\.json: there is no folder /no/such/folder$"):
        program.bench(program.Options(json="/no/such/folder/it.json"), Ranks(), {})
    with pytest.raises(OutputError, match=f"^{tmp_path}: Is a directory$"):
        program.bench(program.Options(("host",), json=str(tmp_path)), Ranks(), {})


def test_nothing_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    program.bench(program.Options(("host", "allreduce")), Ranks(), {})
    assert capsys.readouterr().out.splitlines()[1] == "none of the selected parts can be measured on this machine"


# --- As a program -----------------------------------------------------------------------------------------------------


def ran(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "launch_train.bench", *words]
    world = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(argv, env=world, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_alone(tmp_path: Path) -> None:
    done = ran("--quick", "--only=memory,host", env={contract.RUN_FOLDER: str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["memory", "copy"]
    assert max(map(len, done.stdout.splitlines())) <= 60
    data = json.loads((tmp_path / runfolder.BENCH).read_text())
    assert (data["schema"], data["world_size"], data["quick"], data["ok"], data["findings"]) == (1, 1, True, True, [])
    assert list(data["figures"]) == ["memory copy", "memory triad"]
    assert all(0 < one["least"] == one["value"] and one["unit"] == "GB/s" for one in data["figures"].values())
    assert [(rank["rank"], rank["gpu"], rank["device"], rank["troubles"]) for rank in data["ranks"]] == [
        (0, 0, "cpu", [])
    ]


def test_a_word_that_is_not_known_is_one_line() -> None:
    done = ran("--only=gpus")
    lines = "launch_train.bench: --only 'gpus': there are matmul, memory, host, allreduce, amp, loader\n"
    assert (done.returncode, done.stdout, done.stderr) == (contract.Exit.USAGE, "", lines)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    began = time.monotonic()
    done = ran("--quick", "--json", str(tmp_path / "it.json"))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 90
    data = json.loads((tmp_path / "it.json").read_text())
    assert data["ok"], data["findings"]
    assert {"matmul fp32", "matmul fp16", "memory copy", "to GPU, pinned", measure.SPEED_UP} <= set(data["figures"])
    assert not any(rank["troubles"] for rank in data["ranks"])

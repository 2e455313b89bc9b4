"""What is compiled, what happens if that fails, and what of it is kept. Where the compiler itself doesn't matter, one
that makes no machine code stands in for it (torch's aot_eager), which is quick."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train import models
from launch_train.checkpointing import manifest
from launch_train.common.config import parse
from launch_train.common.storage import LocalFolder
from launch_train.distributed.process_group import Ranks
from launch_train.models import gpt
from launch_train.performance import compile as compiling
from launch_train.performance import micro_batch
from tests.train.trainer.test_determinism import losses
from tests.train.trainer.test_train import events, read, run, steps

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = Ranks(device=torch.device("cuda", 0))
CONFIG: dict[str, Any] = {
    "model": {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 16},
    "data": "synthetic",
    "steps": 5,
    "batch_size": 4,
    "eval": {"every": 5, "batches": 1},
    "compile": True,
}
SMALL: dict[str, Any] = {**CONFIG, "model": {**CONFIG["model"], "n_layer": 2}}
"""As few blocks as can be compiled one by one: the compiler reads each block of a whole model anew."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


def planned(ranks: Ranks = GPU, accumulates: bool = False, **config: Any) -> compiling.CompilePlan:
    parsed = parse({"model": CONFIG["model"], **config})
    return compiling.make_plan(models.build_model(parsed), parsed, ranks, accumulates=accumulates)


# --- What is compiled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "compilers", "mode", "why"),
    [
        ((9, 0), {"cc"}, "regional", "3 identical blocks"),
        ((8, 0), {"gcc"}, "regional", "3 identical blocks"),
        ((8, 9), set(), "off", "needs a C compiler (cc, gcc or clang); none found"),
        ((7, 5), {"gcc"}, "off", "worthwhile on Ampere or newer GPUs only"),
    ],
)
def test_auto_compiles_where_it_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], compilers: set[str], mode: str, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.delenv("CC", raising=False)
    plan = planned(model={**CONFIG["model"], "n_embd": 64})
    assert (plan.mode, plan.why, len(plan.blocks)) == (mode, why, 3 if mode == "regional" else 0)
    assert len(plan.losses) == (mode == "regional")
    assert planned(Ranks()).mode == "off"
    assert (planned(compile="whole").mode, planned(Ranks(), compile="whole").mode) == ("whole", "whole")
    assert planned(compile=False).choices == (("compile", "false", "set in the spec"),)


def test_cuda_graphs_hold_a_whole_pass() -> None:
    plan = planned(compile=True, cuda_graphs=True)
    assert plan.mode == "whole"
    assert plan.choices[1] == ("cuda graphs", "true", "set in the spec")
    refused = planned(compile=True, cuda_graphs=True, accumulates=True, model={**CONFIG["model"], "n_embd": 64})
    assert refused.mode == "regional"
    assert refused.choices[1] == ("cuda graphs", "false", "gradients accumulate over micro-batches")


# --- In a run ---------------------------------------------------------------------------------------------------------


def chosen(rows: list[dict[str, Any]]) -> tuple[str, str]:
    (one,) = [choice for choice in rows[0]["choices"] if choice["what"] == "compile"]
    return one["chosen"], one["why"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("asked", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["regional", "whole"])
def test_compiled_or_not_the_losses_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, mode: str
) -> None:
    monkeypatch.setattr(compiling, "MIN_BLOCK_SHARE", 0.0 if mode == "regional" else 1.0)
    config = {**SMALL, "steps": 3, "eval": {"every": 3, "batches": 1}}
    plain = run(tmp_path / "plain", {**config, "compile": False})
    rows = run(tmp_path / "run", {**config, "activation_checkpointing": asked})
    assert chosen(rows)[0] == mode, chosen(rows)[1]
    if mode == "regional":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # block, loss; in training, evaluation
    assert [row["loss"] for row in steps(rows)] == pytest.approx([row["loss"] for row in steps(plain)], rel=1e-6)
    assert [said_of(tmp_path / name)["compiled"] for name in ("plain", "run")] == [False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_model_compiled_whole_is_evaluated_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one graph, which is made once, before the first step; with the same result."""
    made, passes = list[int](), list[bool]()

    def backend(graph: Any, _inputs: Any) -> Any:
        made.append(len(passes))

        def noted(*args: Any) -> Any:
            passes.append(torch.is_grad_enabled())
            return graph(*args)

        return noted

    monkeypatch.setattr(compiling, "BACKEND", backend)
    config = {**SMALL, "steps": 6, "eval": {"every": 2, "batches": 2}}
    plain = run(tmp_path / "plain", {**config, "compile": False})
    assert not made
    rows = run(tmp_path / "run", {**config, "compile": "whole"})
    assert chosen(rows)[0] == "whole"
    assert made == [0, 1]
    assert [number for number, trains in enumerate(passes) if not trains] == [1, 4, 5, 8, 9, 12, 13]
    assert [event["loss"] for event in events(rows, "eval")] == pytest.approx(
        [event["loss"] for event in events(plain, "eval")], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_where_an_evaluation_cannot_be_compiled_training_still_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return graph if torch.is_grad_enabled() else breaks(graph, inputs)

    monkeypatch.setattr(compiling, "BACKEND", backend)
    rows = run(tmp_path / "run", {**SMALL, "compile": "whole"})
    said = {one["what"]: one["chosen"] for one in rows[0]["choices"]}
    assert (said["compile"], said["evaluation"]) == ("whole", "not compiled")
    assert len(events(rows, "eval")) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("mode", "eager", "compiled", "found"),
    [
        *(("regional", *sizes) for sizes in ((2, 4, 4), (8, 8, 8), (4, 2, 2), (0, 2, 2))),
        ("whole", 2, 4, 4),
    ],
)
def test_the_probe_for_the_micro_batch_runs_what_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, eager: int, compiled: int, found: int
) -> None:
    """With a memory of so many samples for a block that is compiled, and so many for one that is not."""
    forward = gpt.Block.forward

    def scarce(block: gpt.Block, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and len(x) > eager:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(block, x)

    def backend(graph: Any, _inputs: Any) -> Any:
        def passed(*args: torch.Tensor) -> Any:
            if max(len(x) for x in args if x.dim() == 3 or x.dtype == torch.int64) > compiled:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return graph(*args)

        return passed

    monkeypatch.setattr(gpt.Block, "forward", scarce)
    monkeypatch.setattr(compiling, "BACKEND", backend)
    monkeypatch.setattr(compiling, "MIN_BLOCK_SHARE", 0.0 if mode == "regional" else 2.0)
    monkeypatch.setattr(micro_batch, "is_memory_bounded", lambda device: True)
    rows = run(tmp_path / "run", {**SMALL, "steps": 2, "batch_size": 8, "eval": {"every": 2, "batches": 1}})
    said = {one["what"]: one["chosen"] for one in rows[0]["choices"]}
    assert (said["compile"], said["micro-batch"]) == (mode, str(found))
    assert len(steps(rows)) == 2


@pytest.mark.usefixtures("quick")
def test_a_compiler_that_fails_leaves_the_probe_what_it_found_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", breaks)
    monkeypatch.setattr(micro_batch, "is_memory_bounded", lambda device: True)
    rows = run(tmp_path / "run", {**SMALL, "steps": 1})
    said = {one["what"]: one["chosen"] for one in rows[0]["choices"]}
    assert (said["compile"], said["micro-batch"]) == ("false", "4")


def said_of(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint says of its run."""
    storage = LocalFolder(folder)
    (newest, *_) = manifest.manifest_names(storage)
    return manifest.read(storage, newest).about


def breaks(_graph: Any, _inputs: Any) -> None:
    raise RuntimeError("no such kernel\nand more")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("most", [0.0, 1.0], ids=["regional", "whole"])
def test_a_model_that_cannot_be_compiled_trains_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", breaks)
    monkeypatch.setattr(compiling, "MIN_BLOCK_SHARE", most)
    rows = run(tmp_path / "run", CONFIG)
    assert chosen(rows)[0] == "false"
    assert chosen(rows)[1].startswith("it failed: rank 0: BackendCompilerFailed: ")
    assert len(steps(rows)) == 5


@pytest.mark.slow(turn=0)
@pytest.mark.parametrize("mode", ["regional", "whole"])
def test_all_ranks_go_without_the_compiler_if_one_has_to(switches: Path, mode: str) -> None:
    """The others don't wait for it in the middle of a pass."""
    rows = read(switches / f"failed-{mode}")
    said, why = chosen(rows)
    assert said == "false"
    assert why.startswith("it failed: rank 1: BackendCompilerFailed: ")
    assert "out of registers" in why
    assert len(steps(rows)) == 4


@pytest.mark.slow(turn=0)
def test_two_ranks_compile(switches: Path) -> None:
    for name in ("compiled", "compiled-shared"):
        assert chosen(read(switches / name))[0] == "regional"
        assert losses(switches / name)[0] == pytest.approx(losses(switches / "uncompiled")[0], rel=1e-6)


# --- What is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.e2e  # the compiler takes half a minute and more on a CPU
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # which the compiler still uses
def test_another_start_compiles_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real compiler: on another machine, whose disk has nothing, it finds everything in the run folder."""
    from torch._dynamo.utils import counters

    config = {**CONFIG, "steps": 1, "eval": {"every": 0}, "model": {**CONFIG["model"], "n_layer": 2}}
    monkeypatch.setattr(compiling, "MIN_BLOCK_SHARE", 0.0)
    found = []
    for machine in ("one", "other"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / machine))
        torch._dynamo.reset()
        counters.clear()
        shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
        run(tmp_path / "run", config)
        found.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
    assert found == [(4, 0), (0, 4)], "forward and backward of a block, and of the loss"
    (kept,) = LocalFolder(tmp_path / "run").list("compile/")
    assert ", cached)" in capsys.readouterr().out
    assert compiling.load_cache(LocalFolder(tmp_path / "run"), kept)


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100)])
def test_what_is_damaged_is_compiled_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes) -> None:
    storage = LocalFolder(tmp_path)
    assert not compiling.load_cache(storage, "compile/a.bin")
    storage.write("compile/a.bin", damage)
    assert not compiling.load_cache(storage, "compile/a.bin")
    assert (
        capsys.readouterr().out
        == "compile cache compile/a.bin is not usable, compiling from scratch: checksum mismatch\n"
    )


def test_what_torch_cannot_read_is_compiled_anew(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    storage.write("compile/a.bin", hashlib.sha256(b"another version").digest() + b"another version")
    assert not compiling.load_cache(storage, "compile/a.bin")

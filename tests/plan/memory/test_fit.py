"""Whether a run fits its GPUs: the refusal of a plan, what it proposes, and the line of a plan's page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launch_train.common.config import parse
from launcher.catalog import load
from launcher.errors import PlanRefused
from launcher.plan.memory.fit import fit_of, memory_line
from launcher.plan.memory.need import GB, Setup, divisors, largest_micro_batch, memory_setup, need
from launcher.plan.memory.sizes import sizes_of
from launcher.plan.placement import choose
from tests.command import launch
from tests.plan.planning import context, planned, spec

HUGE = {"name": "gpt", "n_layer": 1000, "n_head": 1000, "n_embd": 100_000, "block_size": 1_000_000}
TINY_CARD = Setup(memory_gb=16, world=1, share=24, half=True, compiles=False)


def trained(machine: dict[str, Any], **config: Any) -> dict[str, Any]:
    """The fields of a spec of the built-in trainer."""
    return {"machine": machine, "run": {"config": config}, "regions": ["us-central1"]}


@pytest.mark.parametrize("target", ["vertex", "vm"])
@pytest.mark.parametrize(
    ("gpu", "model"), [("t4", "gpt2-xl"), ("l4", "gpt2-xl"), ("t4", "gpt2-large"), ("h100", HUGE)], ids=str
)
def test_a_model_that_cannot_fit_is_refused(target: str, gpu: str, model: Any) -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(target, **trained({"type": gpu, "gpus": 1}, model=model), output="gs://b/r")
    assert refused.value.field == "run.config.model"
    assert refused.value.hint


def test_the_refusal_names_the_line_and_its_proposals_work(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: job\nmachine: {type: t4, gpus: 1}\nregions: [us-central1]\nrun:\n  config:\n    model: gpt2-xl\noutput: gs://bucket/runs\n"
    )
    ran = launch("vertex", job, "--dry-run")
    assert ran.code == 2
    assert f"{job}:6: " in ran.err
    proposals = ran.err.splitlines()[-1].removeprefix("Use ").removesuffix(".").split(" or ")
    assert len(proposals) == 2
    for flags in proposals:
        again = launch("vertex", job, *shlex.split(flags), "--dry-run")
        assert again.code == 0, again.err
        assert "May not fit" not in again.out


@pytest.mark.parametrize(
    "run",
    [
        {"module": "mine"},
        {"script": "train.py"},
        {"config": {"model": {"name": "hf:gpt2", "pretrained": True}, "data": {"path": "data.txt", "block_size": 64}}},
        {"config": {"model": "gpt2-large", "micro_batch_size": 24}},  # the trainer halves it
    ],
    ids=str,
)
def test_nothing_unknown_is_refused(run: dict[str, Any]) -> None:
    assert planned(machine={"type": "l4", "gpus": 1}, run=run, output="gs://b/r").attempts


def test_a_rehearsal_is_never_refused() -> None:
    assert planned("local", **trained({"type": "t4", "gpus": 1}, model="gpt2-xl")).attempts


@pytest.mark.parametrize("gpu", ["t4", "v100", "p4", "l4", "a100-40gb", "h100"])
def test_the_micro_batch_of_the_estimate_fits_and_divides_the_share(gpu: str) -> None:
    config = parse({"model": "gpt2-124m", "batch_size": 480})
    model = sizes_of(config)
    assert model is not None
    card = load().gpu(gpu)
    setup = memory_setup(config, card, world=1, memory_gb=card.memory_gb)
    found = largest_micro_batch(model, setup)
    assert found
    assert 480 % found == 0
    assert need(model, setup, found).total <= 0.9 * card.memory_gb * GB
    larger = min((size for size in divisors(480) if size > found), default=None)
    assert larger is None or need(model, setup, larger).total > setup.available


def test_what_makes_a_run_smaller() -> None:
    """Each technique saves what it should; a need never shrinks with the micro-batch."""
    model = sizes_of(parse({"model": "gpt2-medium"}))
    assert model is not None
    plain, eight = TINY_CARD, replace(TINY_CARD, world=8)
    modes = [replace(plain, checkpointing=mode) for mode in ("none", "selective", "full")]
    assert [need(model, one, 8).total for one in modes] == sorted(need(model, one, 8).total for one in modes)[::-1]
    sharded = need(model, replace(eight, sharded=True), 1)
    assert sharded.total < need(model, eight, 1).total
    weights = next(part.size for part in sharded.parts if part.name == "weights")
    assert weights == -(-4 * model.parameters // 8)
    totals = [need(model, plain, size).total for size in range(1, 24)]
    assert totals == sorted(totals)
    assert need(model, plain, 1).sure < need(model, plain, 1).total


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_line_of_a_page(gpus: int) -> None:
    fields = trained({"type": "l4", "gpus": gpus}, model="gpt2-124m", batch_size=64)
    job = spec(**fields)
    (chosen,) = choose(job, load(), "vertex")
    found = fit_of(job, chosen)
    assert found is not None
    assert found.fits
    assert f"micro-batch {found.need.micro_batch};" in memory_line(job, chosen)
    assert found.need.largest.name in memory_line(job, chosen)
    assert ("buckets" in {part.name for part in found.need.parts}) == (gpus == 2)
    explicit = spec(**trained({"type": "l4", "gpus": 1}, model="gpt2-medium", batch_size=64, micro_batch_size=64))
    assert "May not fit" in memory_line(explicit, chosen)
    assert memory_line(spec(run={"module": "mine"}), chosen).startswith("unknown")


@pytest.mark.parametrize(("layers", "nodes", "warned"), [(36, 1, True), (36, 2, False), (33, 1, False)])
def test_a_checkpoints_copy_that_exceeds_the_host_memory_is_a_warning(layers: int, nodes: int, warned: bool) -> None:
    """36 layers with AdamW's moments are 13.3 GB and take at most an eighth more, besides 2 GB of the process; the
    machine has 16 GB, its GPU 24."""
    model = {"name": "gpt", "n_layer": layers, "n_head": 25, "n_embd": 1600, "block_size": 64}
    config = {"model": model, "batch_size": 2, "activation_checkpointing": "full", "parallel": "fsdp"}
    plan = planned("vertex", **trained({"type": "g2-standard-4", "nodes": nodes}, **config), output="gs://b/r")
    assert any("host memory: a checkpoint's copy takes about" in warning for warning in plan.warnings) == warned


def test_the_requests_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's digest is in the requests, so the memory is no part of the plan."""
    fields = trained({"type": "l4", "gpus": 1}, model="gpt2-124m", batch_size=64)
    before = planned(**fields, output="gs://b/r")
    monkeypatch.setattr("launcher.plan.memory.need.CONTEXT", 1)
    assert planned(**fields, output="gs://b/r") == before
    assert "memory" not in before.limits.__struct_fields__


def test_a_limit_of_the_spec_counts() -> None:
    job = spec(**trained({"type": "h100", "gpus": 1, "gpu_memory_gb": 8}, model="gpt2-large"))
    found = fit_of(job, *choose(job, load(), "vertex"))
    assert found is not None
    assert found.cannot
    assert context("local").target == "local"

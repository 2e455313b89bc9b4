"""`parallel: fsdp`: what the ranks share out comes to the same as in DDP, and to the same bits again from a
checkpoint, whoever wrote it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from launch_train import checkpoint, models
from launch_train.checkpointing import manifest
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import UsageError
from launch_train.common.storage import LocalFolder
from launch_train.data import open_data
from launch_train.data.loader import BatchLoader
from launch_train.distributed import dtensor
from launch_train.distributed.dtensor import Region, SavedTensor
from launch_train.distributed.process_group import Ranks
from launch_train.performance import compile as compiling
from launch_train.performance import fsdp, grad_guard, precision
from launch_train.performance import micro_batch as memory
from launch_train.performance import optimizer as optim
from launch_train.trainer import resume, warmup
from launch_train.trainer.build import setup
from launch_train.trainer.replica_check import parameters_sha256
from tests.train import sharing, trials
from tests.train.forked import Forked
from tests.train.sharing import CONFIG, HALF

FP32, BF16 = precision.POLICIES["fp32"], precision.POLICIES["bf16"]


# --- Two ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    """The folders of all that tests.train.sharing does on two ranks, beside the half of a run on one."""
    base = tmp_path_factory.mktemp("session")
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    with sharing.gained():
        trials.preempted(base / "half-one", HALF, **CONFIG)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)
    sharing.on_two_ranks(forked, "tests.train.sharing", base)
    return base


def end(folder: Path) -> Mapping[str, Any]:
    found = trials.read(folder).event("end")
    assert found is not None
    return found


@pytest.mark.slow
def test_it_is_ddp_within_rounding(session: Path) -> None:
    """On two ranks a gradient is a sum of two numbers in either case: only norms are added up in another order."""
    ddp, shared = (list(trials.losses(session / name).values()) for name in ("ddp", "fsdp"))
    assert shared == pytest.approx(ddp, rel=1e-6)
    assert len(shared) == CONFIG["steps"]
    assert end(session / "fsdp")["eval_loss"] == pytest.approx(end(session / "ddp")["eval_loss"], rel=1e-6)


@pytest.mark.slow
def test_the_digest_is_that_of_the_saved_model_or_of_its_shards(session: Path) -> None:
    """With DDP that of the checkpoint's whole tensors, with FSDP that of the digests of both ranks' parts of them."""
    for name in ("ddp", "fsdp"):
        with sharing.gained():
            saved = models.build_model(parse(CONFIG))
        saved.load_state_dict(checkpoint.load(str(session / name))["model"])
        shards = [hashlib.sha256(), hashlib.sha256()]
        for rank, shard in enumerate(shards):
            for key, parameter in saved.named_parameters():
                part = [*parameter.detach().chunk(2), parameter.detach()[:0]][rank]
                shard.update(f"{key} {part.dtype} {tuple(parameter.shape)}\n".encode() + part.numpy().tobytes())
        whole, parts = hashlib.sha256(), " ".join(shard.hexdigest() for shard in shards)
        whole.update(parts.encode())
        expected = whole.hexdigest() if name == "fsdp" else parameters_sha256(saved, Ranks())
        assert end(session / name)["parameters_sha256"] == expected


def test_a_preempted_run_is_the_same_run(session: Path) -> None:
    assert trials.differences(session / "fsdp", session / "resumed") == set()
    assert trials.losses(session / "fsdp") == trials.losses(session / "resumed")
    assert end(session / "resumed")["parameters_sha256"] == end(session / "fsdp")["parameters_sha256"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("half-fsdp", "fsdp-to-fsdp"),
        ("half-fsdp", "fsdp-to-ddp"),
        ("half-ddp", "ddp-to-fsdp"),
        ("half-one", "one-to-fsdp"),
    ],
)
def test_what_is_read_is_what_was_saved(session: Path, source: str, target: str) -> None:
    """To the last bit, also by another kind of run, or by more ranks: what these save at once is the same again."""
    assert saved_in(session / source) + 1 == saved_in(session / target)
    changed = trials.differences(session / source, session / target)
    assert {entry for entry in changed if not entry.startswith("ranks")} == set()


def test_one_rank_reads_what_two_have_shared_out(session: Path, tmp_path: Path) -> None:
    folder = session / "half-fsdp"
    state = checkpoint.load(str(folder))
    env = {contract.RUN_FOLDER: str(folder), contract.ATTEMPT: "1", contract.GENERATION: "7"}
    with sharing.gained():
        run = resume.resume_or_start(setup(parse(CONFIG), Ranks(), env), env)
    run.monitor.close()
    run.sink.close()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    moments, saved = run.optimizer.state_dict()["state"], state["optimizer"]["state"]
    assert moments.keys() == saved.keys()
    assert all(torch.equal(moments[key]["exp_avg"], theirs["exp_avg"]) for key, theirs in saved.items())


def saved_in(folder: Path) -> int:
    return len(manifest.manifest_names(LocalFolder(folder)))


def test_no_rank_saves_the_whole_model(session: Path) -> None:
    """Each saves its own parts, half of it all."""
    storage = LocalFolder(session / "fsdp")
    (newest, *_) = manifest.manifest_names(storage)
    shards = [sum(part.bytes for part in shard) for shard in manifest.read(storage, newest).shards]
    whole = 12 * end(session / "fsdp")["parameters"]  # parameters and two moments, in fp32
    assert all(0.4 * whole < size < 0.75 * whole for size in shards)


def test_gradients_that_do_not_wait_come_to_the_same(session: Path) -> None:
    assert choices(session / "each")["gradients"]["chosen"] == "each micro-batch"
    ours, theirs = (list(trials.losses(session / name).values()) for name in ("each", "fsdp"))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(("name", "step"), [("infinite", 3), ("scaled", 3), ("sgd", 2)])
def test_an_infinite_gradient_on_one_rank_is_skipped_by_all(session: Path, name: str, step: int) -> None:
    rows = trials.read(session / name).rows
    assert [row["step"] for row in rows if "skipped" in row] == [step]
    assert end(session / name)["skipped_steps"] == 1
    model = checkpoint.load(str(session / name))["model"]
    assert all(bool(tensor.isfinite().all()) for tensor in model.values())


@pytest.mark.parametrize(("name", "off"), [("bf16", 2e-3), ("resnet", 1e-5), ("sgd", 1e-6)])
def test_lower_precision_batch_norm_and_sgd_follow_ddp(session: Path, name: str, off: float) -> None:
    ddp, shared = (list(trials.losses(session / f"{name}-{kind}").values()) for kind in ("ddp", "fsdp"))
    assert shared == pytest.approx(ddp, rel=off)
    losses = [end(session / f"{name}-{kind}")["eval_loss"] for kind in ("ddp", "fsdp")]
    assert losses[1] == pytest.approx(losses[0], rel=off)


def test_a_rank_may_try_a_pass_by_itself(session: Path) -> None:
    """The other one doesn't notice, not even when it fails."""
    told = [json.loads((session / f"alone-{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0]["failed"] == "no room"
    assert all(one["before"] == one["after"] == told[0]["before"] for one in told)


def choices(folder: Path) -> dict[str, Any]:
    return {one["what"]: one for one in end(folder)["choices"]}


def test_sgd_says_why_it_is_not_fused(session: Path) -> None:
    assert choices(session / "sgd")["optimizer"]["why"] == "parallel: fsdp has no fused SGD"
    assert choices(session / "sgd-ddp")["optimizer"]["chosen"] == "fused SGD"


# --- Parts of tensors -------------------------------------------------------------------------------------------------


def cut(whole: Tensor, ranks: int, dim: int) -> list[tuple[Region, Tensor]]:
    """As FSDP does it: rows of the same number, but for the last ranks, which may have none."""
    each, found = -(-whole.shape[dim] // ranks), []
    for rank in range(ranks):
        begin_ = min(rank * each, whole.shape[dim])
        part = whole.narrow(dim, begin_, min(each, whole.shape[dim] - begin_))
        found.append((Region(tuple(begin_ if d == dim else 0 for d in range(whole.dim())), tuple(part.shape)), part))
    return found


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(st.just(shape), *(st.integers(0, len(shape) - 1) for _ in range(2)))
    ),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_any_part_comes_from_any_parts(drawn: tuple[list[int], int, int], writers: int, readers: int) -> None:
    shape, cut_by, read_by = drawn
    whole = torch.arange(math.prod(shape)).reshape(shape)
    saved = SavedTensor(tuple(shape), tuple(cut(whole, writers, cut_by)))
    assert torch.equal(dtensor.assemble(saved), whole)
    for place, part in cut(whole, readers, read_by):
        assert torch.equal(dtensor.fill(torch.full(place.size, -1), place, saved), part)


def test_a_part_that_is_missing_is_noticed() -> None:
    parts = cut(torch.arange(10), 3, 0)
    with pytest.raises(ValueError, match=r"has 6 of 10 elements of a tensor of \(10,\)"):
        dtensor.assemble(SavedTensor((10,), (parts[0], parts[2])))
    last = dtensor.fill(torch.empty(2, dtype=torch.int64), Region((8,), (2,)), SavedTensor((10,), (parts[2],)))
    assert last.tolist() == [8, 9]


def test_a_checkpoint_without_parts_is_read_as_it_was() -> None:
    """Whole tensors come back in their memory format, each from the one rank that has it."""
    image = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    one, other = {"tensors": {"a": image, "s": torch.tensor(3.0)}}, {"tensors": {"b": torch.empty(0)}}
    found = {path: dtensor.assemble(saved) for path, saved in dtensor.saved_tensors([one, other]).items()}
    assert found["a"].is_contiguous(memory_format=torch.channels_last)
    assert found["a"].data_ptr() != image.data_ptr()
    assert (found["s"].item(), found["b"].numel()) == (3.0, 0)


# --- One process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Ranks]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Ranks(world=1)
    dist.destroy_process_group()


def model() -> nn.Module:
    return models.build_model(parse(CONFIG))


def test_after_an_evaluation_the_outermost_parameters_go_back(group: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest, and whoever asks for parameters, wants the ranks' parts; no rank gathers the whole model for it."""
    shared = model()
    fsdp.shard_model(shared, group, FP32, models.blocks(shared), moments=2)
    monkeypatch.setattr(type(next(shared.parameters())), "full_tensor", None)
    before = parameters_sha256(shared, Ranks())
    with torch.no_grad():
        shared(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    assert not all(dtensor.is_sharded(one) for one in shared.parameters())
    assert parameters_sha256(shared, Ranks()) == before
    assert all(dtensor.is_sharded(one) for one in shared.parameters())


def test_a_shared_out_model_gets_no_second_try(group: Ranks) -> None:
    shared = model()
    fsdp.shard_model(shared, group, FP32, [], moments=2)
    assert not memory.halve_for_retry(memory.split_evenly(8, 4, 2), shared, Ranks(world=2))


def test_the_probe_finds_what_fits_and_leaves_no_trace(group: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts that run out of memory, here those of more than two samples, leave a model that trains."""
    config = parse({**CONFIG, "data": "synthetic"})
    shared = model()
    fsdp.shard_model(shared, group, FP32, models.blocks(shared), moments=2)
    before = parameters_sha256(shared, Ranks())
    sizes: list[int] = []

    def scarce(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.append(len(inputs[0]))
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("no room")

    hook = models.blocks(shared)[-1].register_forward_pre_hook(scarce)
    batch_loader = BatchLoader(open_data(config, group), slice(0, 8), group.device, config.loader)
    found = warmup.probe_micro_batch(
        shared, batch_loader, group, memory.split_evenly(8, None, 1), FP32, compiling.CompilePlan("off", "")
    )
    batch_loader.close()
    hook.remove()
    assert (found.size, max(sizes)) == (2, 8)
    assert all(one.grad is None for one in shared.parameters())
    tokens = torch.zeros(2, 4, dtype=torch.long)
    shared(tokens, tokens).backward()
    assert all(one.grad is not None for one in shared.parameters())
    assert parameters_sha256(shared, Ranks()) == before


def test_one_rank_has_nobody_to_share_with() -> None:
    plain, (choice,) = fsdp.place_model(model(), parse({**CONFIG, "parallel": "fsdp"}), Ranks(), FP32, [])
    assert not fsdp.has_shards(plain)
    assert (choice.chosen, choice.why) == ("none", "FSDP needs more than one rank")
    assert fsdp.place_model(plain, parse(CONFIG), Ranks(), FP32, []) == (plain, ())


def test_a_single_number_is_refused_by_name() -> None:
    scalar = nn.Linear(2, 2)
    scalar.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(UsageError, match=r"can't shard scale, a scalar: give it the shape \[1\]"):
        fsdp.wrap(scalar, Ranks(world=2), FP32, [])


def test_blocks_with_a_parameter_in_common_stay_in_one_piece(group: Ranks) -> None:
    tied = model()
    blocks: Any = models.blocks(tied)
    assert not fsdp.has_tied_blocks(tied, blocks)
    blocks[1].mlp.up.weight = blocks[0].mlp.up.weight
    assert fsdp.has_tied_blocks(tied, blocks)
    choices = fsdp.shard_model(tied, group, FP32, blocks, moments=2)
    assert len(fsdp.sharded_modules(tied)) == 1
    assert choices[-1].chosen == "in one piece"
    assert blocks[1].mlp.up.weight is blocks[0].mlp.up.weight


def test_parameters_travel_in_the_numbers_of_autocast() -> None:
    resnet = models.build_model(parse({"model": sharing.RESNET, "data": "synthetic"}))
    assert fsdp.mixed_precision_policy(model(), FP32).param_dtype is None
    assert fsdp.mixed_precision_policy(model(), BF16).param_dtype is torch.bfloat16
    assert fsdp.mixed_precision_policy(model(), BF16).reduce_dtype is torch.float32
    assert fsdp.mixed_precision_policy(resnet, BF16).param_dtype is None


@pytest.mark.parametrize(("gigabytes", "wait"), [(80.0, True), (0.0001, False)])
def test_gradients_wait_where_they_have_room(monkeypatch: pytest.MonkeyPatch, gigabytes: float, wait: bool) -> None:
    card = SimpleNamespace(total_memory=gigabytes * 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    assert fsdp.can_defer_gradients(model(), Ranks(device=torch.device("cuda", 0))) is wait


# --- A GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_a_model_comes_from_the_host_and_no_step_waits() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    try:
        shared = model()
        fsdp.shard_model(shared, Ranks(device=device), BF16, models.blocks(shared), moments=2)
        assert {parameter.device.type for parameter in shared.parameters()} == {"cuda"}
        optimizer = optim.build_optimizer(shared, parse(CONFIG).optimizer)
        tokens = torch.zeros(2, 8, dtype=torch.long, device=device)
        _step(shared, optimizer, tokens)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        norm = _step(shared, optimizer, tokens)
        torch.cuda.set_sync_debug_mode("default")
        assert norm.isfinite().item()
        assert all(one.grad is None for one in shared.parameters())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


def _step(shared: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    for last in (False, True):
        with nullcontext() if last else fsdp.no_sync(shared):
            with precision.autocast(BF16, tokens.device):
                loss = shared(tokens, tokens)
            loss.backward()
    norm = dtensor.full_tensor(nn.utils.clip_grad_norm_(shared.parameters(), 1.0))
    grad_guard.skip_unless_finite(optimizer, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm

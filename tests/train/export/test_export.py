"""`launch_train.export`: what other programs load is what was trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from launch_train import checkpoint, runfolder
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import multipart_writer
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import OutputError, TrainError, UsageError
from launch_train.common.storage import LocalFolder, open_storage
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
from launch_train.export import export, find_checkpoint
from launch_train.models import build_model, resolve_task
from launch_train.performance.optimizer import learning_rate
from tests.train import trials
from tests.train.trials import losses, preempted, train

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16}
TRUNK = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt", **SHAPE},
    "gpt with biases": {"name": "gpt", **SHAPE, "bias": True},
    "bert": {"name": "bert", **SHAPE, "dropout": 0.0},
    "hf gpt2": {"name": "hf:gpt2", "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "hf llama": {"name": "hf:llama", "vocab_size": 64, **TRUNK},
    "hf bert": {"name": "hf:bert", "vocab_size": 320, **TRUNK}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "hf vit": {"name": "hf:vit", "image_size": 16, "patch_size": 8, "num_labels": 4, **TRUNK},
}
HALF, STEPS = 4, 8


def config(name: str) -> dict[str, Any]:
    foreign = name.startswith("hf") and name != "hf vit"
    return {
        "model": MODELS[name],
        "data": {"path": "synthetic", "block_size": 16} if foreign else "synthetic",
        "steps": STEPS,
        "eval": {"every": 0},
        "micro_batch_size": "auto",
        "optimizer": {"lr": 2e-3, "warmup_steps": 2},
        "loader": {"workers": 0},
        "monitor": 0,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the run folder of a model, with a checkpoint in the middle and one at the end."""
    base = tmp_path_factory.mktemp("runs")

    def made(name: str) -> Path:
        folder: Path = base / name.replace(" ", "-")
        if not folder.exists():
            preempted(folder, HALF - 1, **config(name))
            train(folder, generation=1, **config(name))
        return folder

    return made


def exported(folder: Path, kind: Any, target: Path, step: int | None = None, **options: Any) -> Path:
    storage = open_storage(str(folder))
    done = export(storage, find_checkpoint(storage, step), kind, str(target), **options)
    assert done.url == str(target)
    written = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {*done.files} == written
    return target


def ours(name: str, state: dict[str, Tensor]) -> nn.Module:
    settings = resolve_task(parse({**trials.CONFIG, **config(name)}))
    model = build_model(settings, open_data(settings, Ranks()))
    model.load_state_dict(state)
    return model.eval()


def batch(name: str, step: int = 1) -> Any:
    settings = resolve_task(parse({**trials.CONFIG, **config(name)}))
    source = open_data(settings, Ranks())
    return source.finish(source.train(step, slice(0, settings.batch_size)))


def test_safetensors_has_a_tied_weight_once(runs: Any, tmp_path: Path) -> None:
    folder = exported(runs("gpt"), "safetensors", tmp_path / "out")
    state = checkpoint.load(str(runs("gpt")))["model"]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {*file.keys()} == state.keys() - {"head.weight"}
        assert json.loads(file.metadata()["tied"]) == {"head.weight": "tokens.weight"}
    model = ours("gpt", state)
    other = ours("gpt", state)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert load_model(other, folder / "model.safetensors") == (set(), [])
    torch.testing.assert_close(other(batch("gpt")[0]), model(batch("gpt")[0]), rtol=0, atol=0)
    facts = json.loads((folder / "config.json").read_text())
    assert (facts["step"], facts["config"]["model"]["n_layer"]) == (STEPS, 2)


def test_torch_loads_without_code(runs: Any, tmp_path: Path) -> None:
    folder = exported(runs("gpt"), "torch", tmp_path / "out", HALF)
    state = torch.load(folder / "model.pt", weights_only=True)
    before = checkpoint.load(str(runs("gpt")), HALF)["model"]
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()
    size = sum(tensor.nbytes for name, tensor in before.items() if name != "head.weight")
    assert (folder / "model.pt").stat().st_size < 2 * size


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(runs: Any, tmp_path: Path, name: str) -> None:
    import transformers

    folder = exported(runs(name), "hf", tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs, loaded = getattr(transformers, config.architectures[0]).from_pretrained(folder, output_loading_info=True)
    assert not loaded["missing_keys"] | loaded["unexpected_keys"]
    auto = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)[1]
    assert not {key for key in auto["missing_keys"] if "pooler" not in key}
    model, (inputs, _) = ours(name, checkpoint.load(str(runs(name)))["model"]), batch(name)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(inputs).logits, model(inputs), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "hf vit"])
def test_transformers_trains_on_with_the_optimizer(runs: Any, tmp_path: Path, name: str) -> None:
    """As its Trainer does (tests/judges has the Trainer itself): its order of parameters, torch's AdamW."""
    import transformers

    folder = exported(runs(name), "hf", tmp_path / "out", HALF)
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    theirs = getattr(transformers, kind).from_pretrained(folder).train()
    decaying = transformers.Trainer.get_decay_parameter_names(None, theirs)
    groups = [
        {"params": [p for n, p in theirs.named_parameters() if (n in decaying) is decays]} for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    scheduler = torch.load(folder / "scheduler.pt", weights_only=True)
    settings = parse({**trials.CONFIG, **config(name)}).optimizer
    assert scheduler["last_epoch"] == json.loads((folder / "trainer_state.json").read_text())["global_step"] == HALF
    assert (
        scheduler["_last_lr"]
        == [learning_rate(HALF + 1, STEPS, settings)] * 2
        == [g["lr"] for g in optimizer.param_groups]
    )
    mine = losses(runs(name))
    for step in range(HALF + 1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, settings)
        inputs, targets = batch(name, step)
        loss = nn.functional.cross_entropy(theirs(inputs).logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        nn.utils.clip_grad_norm_(theirs.parameters(), settings.grad_clip)
        optimizer.step()
        assert loss.item() == pytest.approx(mine[step], abs=1e-4)


def test_without_the_optimizer(runs: Any, tmp_path: Path) -> None:
    folder = exported(runs("gpt"), "hf", tmp_path / "hf", weights_only=True)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


def test_dcp_has_the_optimizer_by_name(runs: Any, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = exported(runs("gpt"), "dcp", tmp_path / "out", HALF)
    saved = checkpoint.load(str(runs("gpt")), HALF)
    model = ours("gpt", checkpoint.load(str(runs("gpt")))["model"])
    groups = [[p for p in model.parameters() if (p.dim() >= 2) is wide] for wide in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with pytest.warns(UserWarning, match="load in a single process"):
        load(state, checkpoint_id=str(folder), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(torch.equal(value, saved["model"][name]) for name, value in model.state_dict().items())
    for number, moments in optimizer.state_dict()["state"].items():
        for key, value in moments.items():
            assert torch.equal(value, saved["optimizer"]["state"][number][key])


def test_a_text_run_brings_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("Grüße aus Köln. " * 500)
    small = {**config("gpt"), "data": str(text), "steps": 2}
    train(tmp_path / "run", **small)
    folder = exported(tmp_path / "run", "hf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Grüße\n \0")["input_ids"] == [*"Grüße\n \0".encode()]
    assert tokenizer.decode([*"Grüße aus".encode()]) == "Grüße aus"
    assert (exported(tmp_path / "run", "torch", tmp_path / "torch") / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["{}/t.json", "gs://my-bucket/t.json", "tiktoken:gpt2"])
def test_a_tokenizer_is_exported_if_the_person_names_it_and_never_because_the_checkpoint_does(
    tmp_path: Path, name: str
) -> None:
    """Who can write to the run folder could name any file that the person can read."""
    name = name.format(tmp_path)
    (tmp_path / "t.json").write_text('{"a": 1}')
    settings = made_by("gpt") | {"data": {"path": "text", "tokenizer": name}}
    write(tmp_path / "run", [{"tensors": {"model/v": torch.ones(2)}, "rest": REST, "own": {}}], config=settings)
    storage = open_storage(str(tmp_path / "run"))
    done = export(storage, find_checkpoint(storage), "torch", str(tmp_path / "out"))
    assert {*done.files} == {"config.json", "model.pt"}
    assert name.removeprefix("tiktoken:") in done.notes[0]
    with pytest.raises(UsageError, match=r"no\.json"):
        exported(tmp_path / "run", "torch", tmp_path / "no", tokenizer=str(tmp_path / "no.json"))
    folder = exported(tmp_path / "run", "torch", tmp_path / "named", tokenizer=str(tmp_path / "t.json"))
    assert (folder / "tokenizer.json").read_text() == '{"a": 1}'


# --- Checkpoints of other kinds ---------------------------------------------------------------------------------------


def write(folder: Path, shards: list[dict[str, Any]], **about: Any) -> None:
    """A checkpoint of step 1 whose ranks have saved `shards`."""
    storage, where = LocalFolder(folder), runfolder.checkpoint_folder(1, "0001-0000")
    parts = [
        multipart_writer.write_shard(storage, where, rank, shard, deadline=time.monotonic() + 60, cancelled=Event())
        for rank, shard in enumerate(shards)
    ]
    manifests.commit(storage, Manifest(1, "0001-0000", tuple(parts), about))


def test_parts_of_fsdp_are_joined(tmp_path: Path) -> None:
    """As two ranks save them: rows 0-2 and 3-4 of a matrix, and a vector that one of them has."""
    matrix, vector = torch.randn(5, 3), torch.randn(4)
    rest = {"model": {"m": {"$tensor": "model/m"}, "v": {"$tensor": "model/v"}}, "optimizer": {}}
    shards = [
        {"tensors": {"model/m": matrix[:3].clone()}, "parts": {"model/m": {"at": [0, 0], "of": [5, 3]}}, "rest": rest},
        {
            "tensors": {"model/m": matrix[3:].clone(), "model/v": vector},
            "parts": {"model/m": {"at": [3, 0], "of": [5, 3]}},
        },
    ]
    write(tmp_path / "run", [{**shard, "own": {}} for shard in shards], config=made_by("gpt"))
    found = load_file(exported(tmp_path / "run", "safetensors", tmp_path / "out") / "model.safetensors")
    assert torch.equal(found["m"], matrix)
    assert torch.equal(found["v"], vector)
    assert torch.equal(torch.load(exported(tmp_path / "run", "torch", tmp_path / "t") / "model.pt")["m"], matrix)


def made_by(name: str) -> dict[str, Any]:
    from launch_train.common.config import as_data

    return json.loads(json.dumps(as_data(parse({**trials.CONFIG, **config(name)}))))  # type: ignore[no-any-return]  # JSON


SCRIPT = """
import numpy, torch
from torch import nn
from launch_train import checkpoint
model = nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "epoch": 3, "curve": numpy.arange(4)}
checkpoint.restore(state)
model(torch.ones(3)).sum().backward()
optimizer.step()
checkpoint.save(1, state, wait=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script") / "run"
    env = {**os.environ, contract.RUN_FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True, timeout=120)
    return folder


@pytest.mark.slow
def test_of_a_script(script: Path, tmp_path: Path) -> None:
    saved = checkpoint.load(str(script))
    storage = open_storage(str(script))
    done = export(storage, find_checkpoint(storage), "torch", str(tmp_path / "torch"))
    assert {*done.files} == {"config.json", "model.pt", "optimizer.pt"}
    assert "epoch, curve" in done.notes[0]
    assert torch.equal(
        torch.load(tmp_path / "torch" / "model.pt", weights_only=True)["weight"], saved["model"]["weight"]
    )
    moments = torch.load(tmp_path / "torch" / "optimizer.pt", weights_only=True)["state"][0]
    assert torch.equal(moments["exp_avg"], saved["optimizer"]["state"][0]["exp_avg"])
    flat = exported(script, "safetensors", tmp_path / "safetensors")
    assert {path.name for path in flat.iterdir()} == {"config.json", "model.safetensors"}
    assert torch.equal(load_file(flat / "model.safetensors")["bias"], saved["model"]["bias"])
    assert exported(script, "dcp", tmp_path / "dcp")
    with pytest.raises(UsageError, match="custom script"):
        exported(script, "hf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


# --- Checkpoints that somebody else wrote -----------------------------------------------------------------------------

REST = {"model": {"v": {"$tensor": "model/v"}}, "optimizer": {}}


@pytest.mark.parametrize("name", ["../outside", "a/b", "/tmp/outside", "..", ".hidden", "a\x1b[2J", "a" * 300, ""])
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_states_name_is_no_path(tmp_path: Path, name: str, kind: str) -> None:
    rest = {"$items": [[name, {"w": {"$tensor": "t"}}]]}
    write(tmp_path / "run", [{"tensors": {"t": torch.ones(2)}, "rest": rest, "own": {}}], script={})
    with pytest.raises(UsageError, match="--format dcp"):
        exported(tmp_path / "run", kind, tmp_path / "deep" / "out")
    assert sorted(path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.pt")) == []
    assert not any((tmp_path / "deep").iterdir())


LLAMA = {"model_type": "llama", "vocab_size": 64, **TRUNK}


@pytest.mark.parametrize(
    "recipe",
    [
        {"class": "Trainer", "config": LLAMA},
        {"class": "pipeline", "config": LLAMA},
        {"class": "AutoModelForCausalLM", "config": LLAMA},
        {"class": "GPT2LMHeadModel", "config": LLAMA},
        {"class": "LlamaForCausalLM", "config": LLAMA | {"model_type": "../llama"}},
        {"class": "LlamaForCausalLM", "config": LLAMA | {"num_hidden_layers": 10**9}},
        {"class": "LlamaForCausalLM", "config": []},
        {"class": ["LlamaForCausalLM"], "config": LLAMA},
    ],
)
def test_hf_builds_only_models_that_the_trainer_builds(tmp_path: Path, recipe: Any) -> None:
    about = {"config": made_by("gpt"), "hf": recipe}
    write(tmp_path / "run", [{"tensors": {"model/v": torch.ones(2)}, "rest": REST, "own": {}}], **about)
    with pytest.raises((UsageError, CheckpointError)):
        exported(tmp_path / "run", "hf", tmp_path / "out", weights_only=True)


def test_hf_takes_the_fields_of_the_models_config_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from launch_train.export import hugging_face

    code = {"attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel", "trust_remote_code": True}
    code |= {"auto_map": {"AutoModel": "evil/repository--model.Evil"}, "quantization_config": {"quant_method": "awq"}}
    taken: list[str] = []

    def for_model(model_type: str, **settings: Any) -> Any:
        taken.extend(settings)
        return original(model_type, **settings)

    original = transformers.AutoConfig.for_model
    monkeypatch.setattr(transformers.AutoConfig, "for_model", for_model)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{k: LLAMA[k] for k in ("vocab_size", *TRUNK)}))
    tensors = {f"model/model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    rest = {"model": {name.removeprefix("model/"): {"$tensor": name} for name in tensors}, "optimizer": {}}
    about = {"config": made_by("gpt"), "hf": {"class": "LlamaForCausalLM", "config": LLAMA | code}}
    write(tmp_path / "run", [{"tensors": tensors, "rest": rest, "own": {}}], **about)
    folder = exported(tmp_path / "run", "hf", tmp_path / "out", weights_only=True)
    assert {*taken} == LLAMA.keys() - {"model_type"}
    assert "evil" not in (folder / "config.json").read_text()
    text = {"model_type": "gemma3_text", "hidden_size": 8}
    config = {"model_type": "gemma3", "text_config": text | code, **code}
    recipe = hugging_face._recipe_of_transformers("Gemma3ForConditionalGeneration", config, "")
    assert recipe.config == {"model_type": "gemma3", "text_config": text}


@pytest.mark.parametrize("kind", ["torch", "safetensors", "hf", "dcp"])
@pytest.mark.parametrize(
    "about",
    [
        {},
        {"config": None},
        {"config": {"model": 3, "loss": None, "data": []}},
        {"config": {"model": {"name": ["gpt"]}, "loss": None, "data": {"path": 3, "tokenizer": {}}}, "trained": 4},
        {"hf": None, "config": {"loss": None}},
    ],
)
def test_a_manifest_of_another_program_is_an_error_and_no_traceback(tmp_path: Path, about: Any, kind: str) -> None:
    write(tmp_path / "run", [{"tensors": {"model/v": torch.ones(2)}, "rest": REST, "own": {}}], **about)
    with pytest.raises(TrainError):
        exported(tmp_path / "run", kind, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_hf_builds_no_billion_layers(name: str) -> None:
    from launch_train.export import hugging_face

    settings = made_by(name)
    about = {"config": settings | {"model": settings["model"] | {"n_layer": 10**12}}}
    with pytest.raises(UsageError, match="n_layer: 1000000000000"):
        hugging_face.prepare(about, weights_only=True)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../../../secret"},
        {"name": "/etc/passwd"},
        {"name": 3},
        {"bytes": "many"},
        {"bytes": 1 << 70},
        {"bytes": -1},
        {"crc32c": None},
    ],
)
def test_a_part_of_a_manifest_is_a_file_of_its_checkpoint(runs: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 9)
    storage = LocalFolder(tmp_path / "run")
    manifest = find_checkpoint(LocalFolder(runs("gpt")), HALF)
    part = manifest.shards[0][0]._replace(**change)
    manifests.commit(storage, manifest._replace(shards=((part,),)))
    with pytest.raises(CheckpointError, match="not a launch manifest"):
        exported(tmp_path / "run", "torch", tmp_path / "out", HALF)
    manifests.commit(LocalFolder(tmp_path / "twice"), manifest._replace(shards=(manifest.shards[0] * 2,)))
    with pytest.raises(CheckpointError, match="not a launch manifest"):
        exported(tmp_path / "twice", "torch", tmp_path / "out", HALF)


def test_a_tensor_that_is_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(1).expand(1 << 20, 1 << 20)
    write(tmp_path / "run", [{"tensors": {"model/v": tensor}, "rest": REST, "own": {}}], config=made_by("gpt"))
    with pytest.raises(CheckpointError, match="larger than"):
        exported(tmp_path / "run", "torch", tmp_path / "out")


@pytest.mark.parametrize("kind", ["link", "linked folder", "pipe", "device"])
def test_a_part_that_is_no_file_of_the_run_folder_is_not_read(runs: Any, tmp_path: Path, kind: str) -> None:
    import shutil

    folder = Path(shutil.copytree(runs("gpt"), tmp_path / "run"))
    (part,) = folder.glob(f"checkpoints/step-{HALF:08d}/*/*.part")
    if kind == "linked folder":
        outside = part.parent.rename(tmp_path / "outside")
        part.parent.symlink_to(outside)
        (folder / "checkpoints" / f"step-{STEPS:08d}").rename(tmp_path / "newer")
        with pytest.raises(CheckpointError):
            find_checkpoint(open_storage(str(folder)), HALF)
        return
    part.rename(tmp_path / "outside")
    match kind:
        case "link":
            part.symlink_to(tmp_path / "outside")
        case "device":
            part.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(part)
    with pytest.raises(OutputError, match="not a file of the folder"):
        exported(folder, "torch", tmp_path / "out", HALF)


# --- Refused ----------------------------------------------------------------------------------------------------------


def test_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        find_checkpoint(open_storage(str(tmp_path)))


def test_an_unknown_step_names_those_that_exist(runs: Any) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint of step 5; it has {HALF}, {STEPS}$"):
        find_checkpoint(open_storage(str(runs("gpt"))), 5)


@pytest.mark.parametrize("kind", ["cut", "flipped", "missing"])
def test_a_damaged_part(runs: Any, tmp_path: Path, kind: str) -> None:
    import shutil

    folder = Path(shutil.copytree(runs("gpt"), tmp_path / "run"))
    (part,) = folder.glob(f"checkpoints/step-{STEPS:08d}/*/*.part")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.unlink() if kind == "missing" else part.write_bytes(content[:-1] if kind == "cut" else content)
    with pytest.raises(CheckpointError, match="missing" if kind == "missing" else "damaged"):
        exported(folder, "torch", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert exported(folder, "torch", tmp_path / "out", HALF)


def test_a_folder_that_is_not_empty(runs: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        exported(runs("gpt"), "torch", tmp_path / "out")
    (tmp_path / "out" / "mine").unlink()
    assert exported(runs("gpt"), "torch", tmp_path / "out")


@pytest.mark.parametrize("kind", ["safetensors", "hf", "torch", "dcp"])
def test_a_full_disk(runs: Any, tmp_path: Path, small_disk: Path, kind: str) -> None:
    (small_disk / "filling").write_bytes(b"\0" * ((1 << 20) - (48 << 10)))
    with pytest.raises(OutputError, match="disk is full"):
        exported(runs("hf bert"), kind, small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["filling"]


def test_a_full_disk_for_the_download(
    runs: Any, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_disk / "filling").write_bytes(b"\0" * ((1 << 20) - (48 << 10)))
    folder = runs("gpt")  # before the change: training takes temporary files too
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with pytest.raises(OutputError, match="disk is full"):
        exported(folder, "torch", tmp_path / "out")


def test_models_without_a_class_in_transformers(tmp_path: Path) -> None:
    from launch_train.export import hugging_face

    settings = made_by("gpt")
    for name in ("resnet50", "my_pkg.model:build", "hf:vit"):
        about = {"config": {**settings, "model": {**settings["model"], "name": name}}}
        with pytest.raises(UsageError, match="safetensors"):
            hugging_face.prepare(about, weights_only=True)


LIMITED = """
import resource, sys
import mmap, torch, safetensors.torch
import torch.distributed.checkpoint
from launch_train.common.storage import open_storage
from launch_train.export import export, find_checkpoint, formats
torch.set_num_threads(1)
torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)  # a private one counts as data, unwritten too
storage = open_storage(sys.argv[1])
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (160 << 20),) * 2)
try:
    torch.ones(256 << 20, dtype=torch.uint8)
except RuntimeError:
    export(storage, find_checkpoint(storage), sys.argv[2], sys.argv[3])
else:
    sys.exit("the limit has no effect")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_memory_stays_below_the_model(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MB in parts of two ranks, with 160 MB for the stacks and heaps of ten threads."""
    monkeypatch.setattr(multipart_writer, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(multipart_writer, "_SPARE", [])
    names = [f"t{number}" for number in range(8)]
    whole = torch.randn(8 << 20)
    half = whole.numel() // 2
    shards: list[dict[str, Any]] = [
        {
            "tensors": {f"model/{name}": whole[at : at + half].clone() for name in names},
            "parts": {f"model/{name}": {"at": [at], "of": [2 * half]} for name in names},
            "own": {},
        }
        for at in (0, half)
    ]
    shards[0]["rest"] = {"model": {name: {"$tensor": f"model/{name}"} for name in names}}
    write(tmp_path / "run", shards, config=made_by("gpt"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "run"), kind, str(tmp_path / "out")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert size > 8 * whole.nbytes


@pytest.mark.parametrize(("kind", "package"), [("safetensors", "safetensors"), ("hf", "transformers")])
def test_a_missing_package(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str) -> None:
    monkeypatch.setattr("launch_train.export.find_spec", lambda name: None if name == package else object())
    with pytest.raises(UsageError, match=f"pip install .*{'hf' if kind == 'hf' else package}"):
        exported(runs("gpt"), kind, tmp_path / "out")

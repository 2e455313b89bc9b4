"""`init_from`: a run begins with the weights of another one, and a checkpoint of its own wins over them."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from launch_train import checkpoint, runfolder
from launch_train.checkpointing import multipart_writer
from launch_train.checkpointing.manifest import Manifest, commit
from launch_train.common.config import InitFrom, local_paths, parse, problems
from launch_train.common.errors import UsageError
from launch_train.common.storage import LocalFolder, open_storage
from launch_train.export import export, find_checkpoint
from launch_train.trainer import init_from
from launcher.testing.googlecloud import GoogleCloud
from tests.train.hub import run_with_hub
from tests.train.models import test_hugging_face
from tests.train.trials import differences, losses, preempted, read, train

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
    "eval": {"every": 0},
    "micro_batch_size": "auto",
    "monitor": 0,
    "loader": {"workers": 0},
    "optimizer": {"lr": 1e-9, "warmup_steps": 0},
    "steps": 1,
}
"""One step that changes nothing worth mentioning."""
ID = "source-0123abcd"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned, in a folder of runs."""
    folder = tmp_path_factory.mktemp("runs") / ID
    torch.set_num_threads(1)
    learning = {**SMALL, "steps": 6, "optimizer": {"lr": 1e-2, "warmup_steps": 0}}
    preempted(folder, 2, **learning)
    train(folder, generation=1, **learning)
    return folder


def weights(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(str(folder), step)["model"]
    return found


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def event(folder: Path) -> dict[str, Any]:
    start = read(folder).event("start")
    assert start is not None
    found: dict[str, Any] = start["init_from"]
    return found


def test_another_runs_weights_alone(source: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", **SMALL, init_from=str(source))
    assert close(weights(tmp_path / "run"), weights(source))
    saved = checkpoint.load(str(tmp_path / "run"))
    assert (saved["loop"]["step"], int(saved["optimizer"]["state"][0]["step"])) == (1, 1)
    assert event(tmp_path / "run") == {
        "source": f"{source}, step 6",
        "loaded": 10,
        "total": 10,
        "missing": [],
        "unused": [],
    }


def test_a_runs_id_is_looked_for_in_the_same_output(source: Path) -> None:
    train(source.parent / "second", **SMALL, init_from={"path": ID, "step": 3})
    assert close(weights(source.parent / "second"), weights(source, 3))
    with pytest.raises(UsageError, match="no checkpoint"):
        train(source.parent / "third", **SMALL, init_from=ID.replace("0", "f"))
    with pytest.raises(UsageError, match="no usable checkpoint of step 2"):
        train(source.parent / "fourth", **SMALL, init_from={"path": ID, "step": 2})


@pytest.mark.parametrize(
    ("kind", "where"), [("safetensors", "folder"), ("torch", "file"), ("torch", "bucket"), ("safetensors", "object")]
)
def test_an_export(
    source: Path, tmp_path: Path, kind: Any, where: str, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    storage, here = open_storage(str(source)), where in ("folder", "file")
    target = str(tmp_path / "out") if here else "gs://my-bucket/models/a"
    export(storage, find_checkpoint(storage), kind, target)
    name = "model.safetensors" if kind == "safetensors" else "model.pt"
    path = target if where in ("folder", "bucket") else f"{target}/{name}"
    train(tmp_path / "run", **SMALL, init_from=path)
    assert close(weights(tmp_path / "run"), weights(source))


def test_a_run_in_a_bucket(source: Path, tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    bucket, folder = open_storage("gs://my-bucket/runs/one"), LocalFolder(source)
    for name in folder.list("checkpoints/"):
        bucket.write(name, folder.read(name))
    train(tmp_path / "run", **SMALL, init_from="gs://my-bucket/runs/one")
    assert close(weights(tmp_path / "run"), weights(source))


def test_on_resume_the_checkpoint_wins(source: Path, tmp_path: Path) -> None:
    config = {**SMALL, "steps": 8, "optimizer": {"lr": 1e-2, "warmup_steps": 0}, "init_from": str(source)}
    train(tmp_path / "whole", **config)
    preempted(tmp_path / "run", 3, **config)
    source.rename(source.with_name("away"))
    try:
        train(tmp_path / "run", generation=1, **config)
    finally:
        source.with_name("away").rename(source)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert differences(tmp_path / "whole", tmp_path / "run") == set()
    with pytest.raises(UsageError, match="init_from was"):
        train(tmp_path / "run", generation=2, **{**config, "init_from": ID})


def test_a_model_of_another_shape(source: Path, tmp_path: Path) -> None:
    wider = {**SMALL, "model": {**SMALL["model"], "n_layer": 2, "vocab_size": 300}}
    with pytest.raises(UsageError, match=r"don't fit the model \(the model also needs: .*strict: false"):
        train(tmp_path / "run", **wider, init_from=str(source))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    train(tmp_path / "run", 1, **wider, init_from={"path": str(source), "strict": False})
    report = event(tmp_path / "run")
    assert report["loaded"] == report["total"] - len(report["missing"]) > 5
    assert any("tokens.weight (shape [300, 16] here, [256, 16] there)" in name for name in report["missing"])
    assert sum(name.startswith("blocks.1.") for name in report["missing"]) == 6
    assert torch.allclose(weights(tmp_path / "run")["positions.weight"], weights(source)["positions.weight"], atol=1e-6)


def test_fewer_layers_leave_some_unused(source: Path, tmp_path: Path) -> None:
    state = {f"module.{name}": value for name, value in weights(source).items()} | {"extra": torch.ones(1)}
    torch.save({"state_dict": state}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="it also has: extra"):
        train(tmp_path / "run", **SMALL, init_from=str(tmp_path / "other.pt"))
    train(tmp_path / "run", 1, **SMALL, init_from={"path": str(tmp_path / "other.pt"), "strict": False})
    assert event(tmp_path / "run")["unused"] == ["extra"]
    assert close(weights(tmp_path / "run"), weights(source))


def test_nothing_that_fits_is_refused_even_if_not_strict(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="don't fit"):
        train(tmp_path / "run", **SMALL, init_from={"path": str(tmp_path / "a.pt"), "strict": False})
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


@pytest.mark.parametrize("content", [b"", b"no zip file", b"\x80\x04."])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(content)
    with pytest.raises(UsageError, match="can't be read"):
        init_from.read(init_from.WeightFiles("a", (tmp_path / f"a.{suffix}",), tmp_path))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="neither checkpoints nor"):
        train(tmp_path / "run", **SMALL, init_from=str(tmp_path))
    with pytest.raises(UsageError, match="no file or folder"):
        train(tmp_path / "other", **SMALL, init_from=str(tmp_path / "none"))


def test_parts_of_fsdp(tmp_path: Path) -> None:
    """Shards of two ranks, into a model with a tied weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
            self.b.weight = self.a.weight

    matrix, storage, where = torch.randn(5, 3), LocalFolder(tmp_path), runfolder.checkpoint_folder(1, "0001-0000")
    rest = {"model": {name: {"$tensor": "model/a.weight"} for name in ("a.weight", "b.weight")}}
    parts = []
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        about = {"model/a.weight": {"at": [rows.start, 0], "of": [5, 3]}}
        content = {"tensors": {"model/a.weight": matrix[rows].clone()}, "parts": about, "own": {}}
        content |= {"rest": rest} if rank == 0 else {}
        deadline = time.monotonic() + 60
        parts.append(multipart_writer.write_shard(storage, where, rank, content, deadline=deadline, cancelled=Event()))
    commit(storage, Manifest(1, "0001-0000", tuple(parts), {}))
    found = init_from.find(InitFrom(str(tmp_path)), {}, Path(tempfile.mkdtemp(dir=tmp_path)))
    model = Tied()
    assert init_from.load(model, init_from.read(found), "it", strict=True).loaded == 2
    assert torch.equal(model.b.weight, matrix)


def test_names_of_wrappers_do_not_matter() -> None:
    theirs = ("module._orig_mod.a", "model.layers.0", "lm_head")
    ours = ("a", "model.model.layers.0", "model.lm_head", "b")
    assert init_from.match_names(ours, theirs) == {
        "a": "module._orig_mod.a",
        "model.model.layers.0": "model.layers.0",
        "model.lm_head": "lm_head",
    }


FROM_HUB = """
import json, pathlib, sys, torch
from launch_train.common.config import InitFrom, parse
from launch_train.common.errors import TrainError
from launch_train.models import build_model
from launch_train.trainer import init_from
for name in sys.argv[2:]:
    try:
        found = init_from.find(InitFrom(name), {}, pathlib.Path())
        model = build_model(parse({"model": json.loads(sys.argv[1])}))
        report = init_from.load(model, init_from.read(found), found.source, strict=True)
        weights = model.model.model.embed_tokens.weight.double().sum().item()
        print(json.dumps({"complete": report.loaded == report.total, "sum": weights}))
    except TrainError as error:
        print(json.dumps({"error": type(error).__name__}))
"""


@pytest.mark.slow
def test_a_model_of_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    model = test_hugging_face.made(test_hugging_face.LLAMA).model
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    words = [json.dumps(test_hugging_face.LLAMA), "hf:org/model", "hf:org/nothing"]
    with test_hugging_face.Models(folder) as hub:
        loaded, missing = run_with_hub(hub.url, tmp_path / "cache", FROM_HUB, *words)
    assert loaded == {"complete": True, "sum": model.model.embed_tokens.weight.double().sum().item()}
    assert missing == {"error": "UsageError"}


# --- The setting ------------------------------------------------------------------------------------------------------


def test_the_setting() -> None:
    assert parse({}).init_from is None
    assert parse({"init_from": ID}).init_from == InitFrom(ID)
    assert parse({"init_from": {"path": "gs://b-1/r", "strict": False}}).init_from == InitFrom("gs://b-1/r", False)
    for wrong in ("", 3, "s3://b/r", "hf:a/b/c", {"strict": False}, {"path": ID, "step": 0}, {"path": ID, "stepp": 1}):
        assert problems({"init_from": wrong}), wrong


def test_only_paths_of_this_machine_are_local() -> None:
    assert local_paths({"init_from": "runs/one"}) == {"init_from": "runs/one"}
    assert local_paths({"init_from": {"path": "/runs/one"}}) == {"init_from": "/runs/one"}
    for elsewhere in (ID, f"{ID}-2", "gs://b-1/r", "hf:gpt2", "hf:org/name"):
        assert local_paths({"init_from": elsewhere}) == {}


def test_it_is_part_of_what_a_manifest_says(source: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", **SMALL, init_from=str(source))
    assert find_checkpoint(LocalFolder(tmp_path / "run")).about["config"]["init_from"] == {
        "path": str(source),
        "strict": True,
        "step": None,
    }
    assert json.dumps(event(tmp_path / "run"))

"""Models of transformers and of the user that the trainer would refuse on the paid machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher import catalog
from launcher.errors import PlanRefused
from tests.command import ROOT
from tests.plan.planning import planned

TEXT = {"path": "python-stdlib", "block_size": 64}


def plan_of(**config: Any) -> None:
    image = config.pop("image", {})
    planned(run={"config": config}, image=image)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hf:nosuchtype", "nosuchtype"),
        ("hf:lama", "llama"),
        ("hf:distilgpt2", "pretrained: true"),
        ("hf:t5", "t5"),
        ({"name": "hf:llama", "task": "image-classification"}, "causal-lm"),
    ],
)
def test_a_type_that_transformers_does_not_have(model: Any, words: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        plan_of(model=model, data=TEXT)
    assert words in str(refused.value)
    assert refused.value.field.startswith("run.config.model")


@pytest.mark.parametrize(
    "model",
    [
        {"name": "hf:llama", "num_hidden_layers": 2},  # its default, 7 B parameters, doesn't fit two H100s with DDP
        {"name": "hf:bert", "task": "causal-lm"},
        {"name": "hf:distilgpt2", "pretrained": True},
        "hf:org/whatever",
    ],
)
def test_a_type_or_a_name_of_the_hub(model: Any) -> None:
    plan_of(model=model, data=TEXT)


@pytest.mark.parametrize("image", [{"requirements": "requirements.txt"}, {"base": f"b@sha256:{'0' * 64}"}])
def test_another_version_of_transformers_may_have_the_type(image: dict[str, str]) -> None:
    plan_of(model="hf:nosuchtype", data=TEXT, image=image)


@pytest.mark.parametrize(
    "config",
    [
        {"model": "hf:llama"},
        {"model": "hf:llama", "data": "python-stdlib"},
        {"model": "hf:llama", "data": "gs://my-bucket/text"},
        {"model": "hf:bert", "data": "gs://my-bucket/text"},
        {"model": "hf:org/name", "data": "python-stdlib"},
        {"model": {"name": "hf:org/name", "task": "causal-lm"}, "data": "gs://my-bucket/text"},
        {
            "model": {"name": "hf:distilgpt2", "pretrained": True},
            "data": {"path": "gs://my-bucket/c", "tokenizer": "t.json"},
        },
        {"model": "mine:build", "data": "python-stdlib"},
        {"model": "mine:build"},
    ],
)
def test_tokens_without_a_block_size(config: dict[str, Any]) -> None:
    with pytest.raises(PlanRefused) as refused:
        plan_of(**config)
    assert refused.value.field == "run.config.data.block_size"


@pytest.mark.parametrize(
    "config",
    [
        {"model": "hf:vit"},
        {"model": "hf:vit", "data": "gs://my-bucket/images"},
        {"model": "hf:org/name"},
        {"model": "hf:org/name", "data": "gs://my-bucket/unknown"},
        {"model": "hf:llama", "data": "mine:build"},
        {"model": "mine:build", "data": "mine:build"},
        {"model": "mine:build", "data": {"image_size": 32}},
        {"model": "mine:build", "data": "gs://my-bucket/unknown"},
        {"model": "gpt", "data": "python-stdlib"},
    ],
)
def test_what_needs_no_block_size_or_may_need_none(config: dict[str, Any]) -> None:
    plan_of(**config)


@pytest.mark.parametrize("name", ["containers/requirements.lock", "dev.lock"])
def test_the_table_is_of_the_locked_transformers(name: str) -> None:
    lock = (ROOT / name).read_text()
    table = (Path(catalog.__file__).parent / "data/transformers_types.csv").read_text()
    version = table.splitlines()[1].split(",")[2].removeprefix("TRANSFORMERS ")
    assert re.search(rf"^transformers=={re.escape(version)}\b", lock, re.MULTILINE), (
        "run python -m tools.catalog.transformers_types"
    )


def test_the_table_is_what_transformers_has() -> None:
    transformers = pytest.importorskip("transformers")
    from tools.catalog.transformers_types import DATA, table

    if f"TRANSFORMERS {transformers.__version__}," not in DATA.read_text():
        pytest.skip(f"transformers {transformers.__version__} is not the locked version")
    assert table() == DATA.read_text()

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch_train.common.config import (
    PRESETS,
    Bert,
    Checkpoint,
    Config,
    Data,
    ExternalModel,
    Gpt,
    Loader,
    Profile,
    ResNet,
    as_data,
    local_paths,
    parse,
    problem_line,
    problems,
    user_functions,
)
from launch_train.common.errors import ConfigError


def test_an_empty_config_has_every_default() -> None:
    assert parse({}) == Config()


def test_the_sample_of_the_documents_is_the_default_but_for_the_minutes() -> None:
    sample = {
        "model": {"name": "gpt", "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
        "data": "python-stdlib",
        "steps": 300,
        "batch_size": 24,
        "micro_batch_size": "auto",
        "optimizer": {
            "name": "adamw",
            "lr": 1e-3,
            "min_lr": 1e-4,
            "warmup_steps": 20,
            "weight_decay": 0.1,
            "grad_clip": 1.0,
        },
        "precision": "auto",
        "compile": "auto",
        "seed": 1337,
        "eval": {"every": 100, "batches": 20},
        "log_every": 10,
        "checkpoint": {"minutes": 10, "keep": {"last": 3, "every": 1000}},
        "profile": "off",
    }
    config = parse(sample)
    assert config.checkpoint == Checkpoint(10, 3, 1000)
    assert parse({**sample, "checkpoint": {}}) == Config()


def test_the_settings_as_data_are_those_that_were_given() -> None:
    given = {"model": {"name": "gpt", "n_layer": 2}, "optimizer": {"lr": 0.1}, "eval": {"every": 3}, "steps": 7}
    data = as_data(parse(given))
    for key, value in given.items():
        assert data[key] | value == data[key] if isinstance(value, dict) else data[key] == value
    assert as_data(parse({"model": "resnet50"}))["model"]["width"] == 64
    assert json.loads(json.dumps(data))["checkpoint"] == {
        "minutes": "auto",
        "keep_last": 3,
        "keep_every": 0,
        "keep_best": 0,
        "keep_metric": "eval_loss",
    }


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_name_of_a_model_can_be_used_alone(name: str) -> None:
    assert parse({"model": name}).model.name == name


def test_a_named_model_can_be_changed_in_part() -> None:
    model = parse({"model": {"name": "gpt2-124m", "dropout": 0.1}}).model
    assert isinstance(model, Gpt)
    assert (model.n_layer, model.dropout) == (12, 0.1)


def test_resnet_learns_from_synthetic_images_unless_said_otherwise() -> None:
    config = parse({"model": "resnet50"})
    assert (config.model, config.data) == (ResNet(), Data("synthetic"))


def test_models_of_others_keep_their_own_settings() -> None:
    config = parse({"model": {"name": "hf:llama", "hidden_size": 64, "pretrained": False}, "loss": "a.b:c"})
    assert config.model == ExternalModel("hf:llama", {"hidden_size": 64})
    assert (config.data.path, config.loss) == ("synthetic", "a.b:c")
    assert parse({"model": "my_pkg.model:build"}).model == ExternalModel("my_pkg.model:build")
    data = {"path": "my_pkg.data:build", "settings": {"length": 3}}
    assert parse({"data": data}).data == Data("my_pkg.data:build", settings={"length": 3})
    assert json.loads(json.dumps(as_data(parse({"data": data}))))["data"]["settings"] == {"length": 3}


def test_bert_hides_a_share_of_its_tokens() -> None:
    model = parse({"model": {"name": "bert-large", "masked": 0.2}}).model
    assert isinstance(model, Bert)
    assert (model.n_layer, model.vocab_size, model.masked) == (24, 30528, 0.2)


def test_what_the_machine_decides_is_none() -> None:
    config = parse({"compile": "auto", "channels_last": "auto", "loader": {"workers": "auto", "prefetch": 4}})
    assert (config.compile, config.channels_last, config.loader) == (None, None, Loader(None, 4))
    assert parse({"profile": {"active": 7}}).profile == Profile(5, 2, 7)
    assert parse({"profile": False}).profile is None


def test_min_lr_and_warm_up_follow_lr_and_steps() -> None:
    config = parse({"steps": 50, "optimizer": {"lr": 0.02}})
    assert (config.optimizer.min_lr, config.optimizer.warmup_steps) == (0.002, 5)
    assert parse({"steps": 5}).optimizer.warmup_steps == 0


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"stps": 3}, "stps", "did you mean steps?"),
    ({"optimizer": {"warmup": 3}}, "optimizer.warmup", "did you mean warmup_steps?"),
    ({"steps": 0}, "steps", "from 1"),
    ({"steps": True}, "steps", "whole number"),
    ({"steps": 3.0}, "steps", "whole number"),
    ({"steps": "300"}, "steps", "'300'"),
    ({"steps": None}, "steps", "None"),
    ({"log_every": 0}, "log_every", "from 1"),
    ({"seed": -1}, "seed", "from 0"),
    ({"optimizer": {"lr": 0}}, "optimizer.lr", "above 0"),
    ({"optimizer": {"lr": float("nan")}}, "optimizer.lr", "nan"),
    ({"optimizer": {"lr": float("inf")}}, "optimizer.lr", "inf"),
    ({"optimizer": {"lr": 10**400}}, "optimizer.lr", "above 0"),
    ({"optimizer": {"betas": [0.9, 1]}}, "optimizer.betas", "two numbers"),
    ({"optimizer": {"lr": 1e-5, "min_lr": 1e-3}}, "optimizer.min_lr", "above lr"),
    ({"steps": 10, "optimizer": {"warmup_steps": 11}}, "optimizer.warmup_steps", "above steps"),
    ({"optimizer": [1]}, "optimizer", "not a mapping"),
    ({"precision": "bf61"}, "precision", "bf16"),
    ({"compile": "yes"}, "compile", "auto, true, false"),
    ({"compile": 1}, "compile", "auto, true, false"),
    ({"profile": True}, "profile", "off"),
    ({"model": "gpt2-124"}, "model", "did you mean gpt2-124m?"),
    ({"model": 5}, "model", "name or a mapping"),
    ({"model": {"name": [1]}}, "model.name", "not a model name"),
    ({"model": {"n_embd": 130}}, "model.n_embd", "not divisible by n_head"),
    ({"model": {"n_layers": 2}}, "model.n_layers", "did you mean n_layer?"),
    ({"model": {"name": "resnet50", "n_layer": 2}}, "model.n_layer", "num_classes"),
    ({"model": {"dropout": 1}}, "model.dropout", "0.99"),
    ({"model": {"vocab_size": 255}}, "model.vocab_size", "at least 256"),
    ({"model": "resnet50", "data": "python-stdlib"}, "data", "needs images"),
    ({"model": {"name": "hf:gpt2", "pretrained": "yes"}}, "model.pretrained", "true, false"),
    ({"model": {"name": "hf:gpt2", "task": "chat"}}, "model.task", "masked-lm"),
    ({"model": "hf:a/b/c"}, "model", "hf:TYPE"),
    ({"model": "my pkg:build"}, "model", "my_pkg.model:build"),
    ({"model": {"name": "bert-large", "bias": True}}, "model.bias", "unknown setting"),
    ({"model": {"name": "bert", "masked": 1}}, "model.masked", "0.9"),
    ({"data": {"path": "corpus", "settings": {"a": 1}}}, "data.settings", "custom function"),
    ({"data": {"block_size": 1}}, "data.block_size", "from 2"),
    ({"data": {"path": "a", "train": "b"}}, "data.train", "remove one of them"),
    ({"data": {"train": 3}}, "data.train", "a file or a folder"),
    ({"data": {"train": "a", "val": "synthetic"}}, "data.val", "a file or a folder"),
    ({"data": {"train": "a", "val": "my.data:build"}}, "data.val", "a file or a folder"),
    ({"data": {"train": "my.data:build", "val": "a"}}, "data.val", "split='held_out'"),
    ({"data": {"train": "synthetic", "val": "a"}}, "data.val", "set data.train"),
    ({"data": {"val": "a"}}, "data.val", "set data.train"),
    ({"data": {"path": "a", "dtype": "float32"}}, "data.dtype", "uint16"),
    ({"loss": "cross_entropy"}, "loss", "my_pkg.losses:loss"),
    ({"loader": {"workers": -1}}, "loader.workers", "auto"),
    ({"ddp": {"bucket_mib": 0}}, "ddp.bucket_mib", "auto"),
    ({"ddp": {"static_graph": "yes"}}, "ddp.static_graph", "auto"),
    ({"ddp": {"gradient_as_bucket_view": "auto"}}, "ddp.gradient_as_bucket_view", "true"),
    ({"optimizer": {"fused": 1.5}}, "optimizer.fused", "auto"),
    ({"attention": "flash2"}, "attention", "flash"),
    ({"deterministic": "yes"}, "deterministic", "auto"),
    ({"compile": "all"}, "compile", "whole"),
    ({"parallel": "tp"}, "parallel", "ddp, fsdp"),
    ({"activation_checkpointing": True}, "activation_checkpointing", "selective"),
    ({"compile": False, "cuda_graphs": True}, "cuda_graphs", "compiler"),
    ({"cuda_graphs": True, "parallel": "fsdp"}, "cuda_graphs", "parallel: fsdp"),
    ({"profile": {"active": 0}}, "profile", "{wait: 5"),
    ({"profile": {"steps": 3}}, "profile", "{wait: 5"),
    ({"non_finite": -1}, "non_finite", "from 0"),
    ({"loggers": "wandb"}, "loggers", "a list of tensorboard, wandb, mlflow, vertex"),
    ({"loggers": ["wandb", "weights"]}, "loggers.1", "use tensorboard"),
    ({"loggers": ["wandb", "mflow"]}, "loggers.1", "did you mean mlflow?"),
    ({"loggers": ["wandb", "wandb"]}, "loggers.1", "listed twice"),
    *(({"hang_after": value}, "hang_after", "auto, off") for value in (0, -1, 1e6, "soon", True, None, [60])),
    ({"data": ""}, "data", "a file or a folder"),
    ({"data": "s3://bucket/corpus"}, "data", "gs://BUCKET/"),
    ({"data": "gs://"}, "data", "gs://BUCKET/"),
    ({"data": "gs:/bucket/x"}, "data", "gs://BUCKET/"),
    ({"data": {"path": "a", "tokenizer": "https://host/t.json"}}, "data.tokenizer", "gs://BUCKET/"),
    ({"batch_size": 10, "micro_batch_size": 4}, "micro_batch_size", "not divisible by 4"),
    ({"checkpoint": {"keep": {"last": 0}}}, "checkpoint.keep.last", "from 1"),
    ({"eval": {"every": -1}}, "eval.every", "from 0"),
    *(
        ({"eval": {"samples": value}}, "eval.samples", "from 0 to 16")
        for value in (-1, True, 17, 10**9, 1.5, "2", None)
    ),
    ({"eval": {"samples": 1, "every": 0}}, "eval.samples", "set eval.every"),
    ({"eval": {"samples": 1}, "parallel": "fsdp"}, "eval.samples", "no rank has the whole model"),
    ({"eval": {"samples": 1}, "model": "bert-base"}, "eval.samples", "predicts hidden tokens"),
    (
        {"eval": {"samples": 1}, "model": {"name": "hf:roberta", "task": "masked-lm"}},
        "eval.samples",
        "hf:roberta, which predicts hidden tokens",
    ),
    ({"eval": {"samples": 1}, "model": "bert.of_mine:build"}, "eval.samples", "a custom model (bert.of_mine:build)"),
]


@pytest.mark.parametrize(("config", "where", "words"), WRONG)
def test_a_wrong_value_is_named_with_its_place(config: dict[str, Any], where: str, words: str) -> None:
    (problem,) = problems(config)
    assert ".".join(map(str, problem[0])) == where
    assert words in problem_line(problem)


@pytest.mark.parametrize("value", ["auto", "off", 1, 90, 2.5, 604_800])
def test_when_a_run_hangs_is_seconds_or_the_trainers_choice(value: Any) -> None:
    assert parse({"hang_after": value}).hang_after == value
    assert parse({}).hang_after == "auto"


@pytest.mark.parametrize(
    "config",
    [
        {"eval": {"samples": 16}},
        {"eval": {"samples": 4}, "model": "resnet50"},
        {"eval": {"samples": 4}, "model": "hf:bert"},
        {"eval": {"samples": 0, "every": 0}, "parallel": "fsdp", "model": "bert"},
    ],
)
def test_where_samples_may_be_asked_for(config: dict[str, Any]) -> None:
    assert parse(config).eval.samples == config["eval"]["samples"]
    assert parse({}).eval.samples == 0


def test_one_problem_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^invalid run\.config: stps: unknown setting; did you mean steps\?$"):
        parse({"stps": 1})


def test_the_paths_of_a_config_are_those_of_files() -> None:
    assert local_paths({"data": "corpus/"}) == {"data": "corpus/"}
    assert local_paths({"data": {"train": "a", "val": "b"}}) == {"data": "a", "data.val": "b"}
    assert user_functions({"data": {"train": "my.data:build"}}) == {"data": "my.data:build"}
    assert parse({"data": {"train": "a", "val": "b"}}).data == parse({"data": "a"}).data._replace(val="b")
    named = {"path": "a.txt", "tokenizer": "t.json"}
    assert local_paths({"data": named}) == {"data": "a.txt", "data.tokenizer": "t.json"}
    for path in ("gs://bucket/x", "synthetic", "python-stdlib", "my.data:build"):
        assert local_paths({"data": {"path": path, "tokenizer": "tiktoken:gpt2"}}) == {}
    assert local_paths({}) == local_paths({"data": 3}) == {}


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"stps": 1, "log_every": 0, "model": {"n_head": 0}, "optimizer": {"lr": "x", "betas": 1}})
    assert str(caught.value).count("\n") == 5


def test_what_is_allowed_although_it_looks_odd() -> None:
    assert problems({"model": {"vocab_size": 10}, "data": "synthetic", "profile": False, "data ": 1}) != []
    assert problems({"model": {"vocab_size": 10}, "data": "synthetic", "profile": False}) == []
    assert problems({"optimizer": {"lr": 1, "grad_clip": 0}, "eval": {"every": 0}, "compile": True}) == []


_NAMES = st.sampled_from([*Config._fields, "name", "lr", "keep", "n_embd", "every", "minutes", "profile"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*PRESETS, "auto", "off"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(_NAMES | st.text(), _VALUES, max_size=6))
def test_any_mapping_is_either_parsed_or_refused_in_words(config: dict[str, Any]) -> None:
    found = problems(config)
    if found:
        assert all(what for _, what, _ in found)
    else:
        assert parse(config).steps >= 1


@pytest.mark.parametrize(
    "modules",
    ["launch_train.common.config", "launch_train.metrics, launch_train.checkpoint, launch_train.common.storage"],
)
def test_what_others_import_loads_neither_torch_nor_numpy(modules: str) -> None:
    heavy = {"torch", "numpy", "google.auth", "google.cloud.storage", "tensorboard"}
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy & set(done.stdout.split()) == set()

"""Validate `run.config`: each key by its rule, and the combinations of keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launch_train.common.config.rules import RUN_ID, Problem, check, is_code, is_foreign, shown
from launch_train.common.config.settings import DEFAULT, FIELDS, PRESETS, ExternalModel, fields_of, kind_of
from launch_train.common.contract import LOGGER_NAMES
from launch_train.common.text import did_you_mean


def problems(config: Mapping[str, Any]) -> list[Problem]:
    """Return all problems of `config`, in the order of its keys; empty if it is valid."""
    long = expand_short_forms(config)
    invalid = [
        *check(long, FIELDS, ()),
        *_model_problems(long),
        *_data_problems(long),
        *_batch_problems(long),
        *_optimizer_problems(long),
        *_graph_problems(long),
        *_init_problems(long),
        *_keep_problems(long),
        *_sample_problems(long),
        *_logger_problems(long),
    ]
    short = {key for key in long if key not in config or type(config[key]) is not type(long[key])}
    return [(path[:1] if path[0] in short else path, wrong, right) for path, wrong, right in invalid]


def line(problem: Problem) -> str:
    """Return one problem as a line of text."""
    path, wrong, right = problem
    return f"{'.'.join(map(str, path)) or 'run.config'}: {wrong}" + (f"; {right}" if right else "")


def expand_short_forms(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expand the short forms: `checkpoint: auto` (or off) to `checkpoint: {minutes: auto}`, its `keep: 3` to `keep:
    {last: 3}`, `data: PATH` to `data:
    {path: PATH}`, `init_from: PATH` likewise, `model: NAME` to `model: {name: NAME}`."""
    long = dict(config)
    if isinstance(config.get("checkpoint"), str):
        long["checkpoint"] = {"minutes": config["checkpoint"]}
    elif isinstance(config.get("checkpoint"), Mapping) and type(config["checkpoint"].get("keep")) is int:
        long["checkpoint"] = {**config["checkpoint"], "keep": {"last": config["checkpoint"]["keep"]}}
    for key, inner in (("data", "path"), ("model", "name"), ("init_from", "path")):
        if isinstance(config.get(key), str):
            long[key] = {inner: config[key]}
    return long


# --- Combinations of keys; each function skips values that their own rule rejects -----------------------------------


def user_functions(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user functions that a config names, by key: `model`, `data`, `loss`."""
    long = expand_short_forms(config)
    model, data = ({} if not isinstance(long.get(key), Mapping) else long[key] for key in ("model", "data"))
    names = {"model": model.get("name"), "data": training_path(data), "loss": long.get("loss")}
    return {key: name for key, name in names.items() if is_code(name)}


def local_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the local files and folders that a config names, by key (`data`, `data.val`, `init_from` …)."""
    long = expand_short_forms(config)
    data, weights = (long[key] if isinstance(long.get(key), Mapping) else {} for key in ("data", "init_from"))
    named = {"data": training_path(data), "data.val": data.get("val"), "data.tokenizer": data.get("tokenizer")}
    paths = {key: path for key, path in named.items() if isinstance(path, str) and not _is_not_local(path)}
    path = weights.get("path")
    return paths | ({"init_from": path} if isinstance(path, str) and kind_of_weights(path) == "local" else {})


def kind_of_weights(path: str) -> str:
    """Return `run`, `bucket`, `hub` or `local`: where `init_from` finds its weights."""
    kinds = {"bucket": path.startswith("gs://"), "hub": path.startswith("hf:"), "run": bool(re.match(RUN_ID, path))}
    return next((kind for kind, holds in kinds.items() if holds), "local")


def training_path(data: Mapping[str, Any]) -> Any:
    """Return `path`, or `train`, which means the same; None if neither is set."""
    return data.get("path", data.get("train"))


def _is_not_local(path: str) -> bool:
    known = path in ("bytes", "synthetic", "python-stdlib") or path.startswith(("gs://", "hf:", "tiktoken:"))
    return known or is_code(path)


def _model_problems(config: Mapping[str, Any]) -> list[Problem]:
    model = config.get("model", {})
    if not isinstance(model, Mapping):
        return []
    name = model.get("name", "gpt")
    if is_foreign(name):
        fields = fields_of(ExternalModel)
        return check({key: value for key, value in model.items() if key in fields}, fields, ("model",))
    if not isinstance(name, str) or name not in PRESETS:
        known = f"the models are {', '.join(PRESETS)}, hf:TYPE (transformers), or a custom my_pkg.model:build"
        close = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
        wrong = f"unknown model {shown(name)}" if isinstance(name, str) else f"{shown(name)} is not a model name"
        return [(("model", "name"), wrong, close or known)]
    if invalid := check(model, fields_of(kind_of(name)), ("model",)):
        return invalid
    shape = _with_defaults(model)
    if "n_head" not in shape or shape["n_embd"] % shape["n_head"] == 0:
        return []
    wrong = f"{shape['n_embd']} is not divisible by n_head, {shape['n_head']}"
    return [(("model", "n_embd"), wrong, "each head needs the same number of channels")]


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a built-in model."""
    name = settings.get("name", "gpt")
    return {**kind_of(name)()._asdict(), **PRESETS[name], **settings}


def _data_problems(config: Mapping[str, Any]) -> list[Problem]:
    data, model = config.get("data", {}), config.get("model", {})
    if not isinstance(model, Mapping) or _model_problems(config) or check({"data": data}, FIELDS, ()):
        return []
    path = training_path(data) or "the default"
    if problems := _path_problems(data, path):
        return problems
    if is_foreign(model.get("name", "gpt")) or path == "synthetic" or is_code(path):
        return []
    shape = _with_defaults(model)
    if path == "python-stdlib" and "num_classes" in shape:
        return [(("data",), "python-stdlib is text, but resnet50 needs images", "use a folder of images, or synthetic")]
    if data.get("tokenizer", "bytes") == "bytes" and not _may_be_tokens(path) and shape.get("vocab_size", 256) < 256:
        wrong = f"{shape['vocab_size']} is too small"
        return [(("model", "vocab_size"), wrong, "text is read as bytes: use at least 256")]
    return []


def _path_problems(data: Mapping[str, Any], path: str) -> list[Problem]:
    if "path" in data and "train" in data:
        return [(("data", "train"), "means the same as path, which is also set", "remove one of them")]
    if "settings" in data and not is_code(path):
        return [(("data", "settings"), "only applies to a custom function", "set path: my_pkg.data:build")]
    if "val" in data and (path in ("the default", "synthetic") or is_code(path)):
        wrong = f"needs a file or a folder to train on, and the data is {path}"
        return [(("data", "val"), wrong, "set data.train; a custom function gets split='held_out'")]
    return []


def _may_be_tokens(path: str) -> bool:
    """Return whether a path may be files of tokens, of any vocabulary: by its suffix, or because it has none."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    return path not in ("the default", "python-stdlib") and ("." not in name or name.endswith((".bin", ".npy")))


def _batch_problems(config: Mapping[str, Any]) -> list[Problem]:
    batch, micro = config.get("batch_size", DEFAULT.batch_size), config.get("micro_batch_size", "auto")
    if micro == "auto" or not FIELDS["batch_size"].holds(batch) or not FIELDS["batch_size"].holds(micro):
        return []
    if batch % micro == 0:
        return []
    wrong = f"batch_size, {batch}, is not divisible by {micro}"
    return [(("micro_batch_size",), wrong, "batch_size is global: a multiple of ranks x micro_batch_size")]


def _optimizer_problems(config: Mapping[str, Any]) -> list[Problem]:
    optimizer, steps = config.get("optimizer", {}), config.get("steps", DEFAULT.steps)
    if not isinstance(optimizer, Mapping):
        return []
    rules, problems = FIELDS["optimizer"], list[Problem]()
    lr, low, warmup = (
        optimizer.get("lr", DEFAULT.optimizer.lr),
        optimizer.get("min_lr"),
        optimizer.get("warmup_steps"),
    )
    if rules["lr"].holds(lr) and rules["min_lr"].holds(low) and low > lr:
        problems.append(
            (("optimizer", "min_lr"), f"{low} is above lr, {lr}", "the learning rate falls from lr to min_lr")
        )
    if rules["warmup_steps"].holds(warmup) and FIELDS["steps"].holds(steps) and warmup > steps:
        problems.append(
            (("optimizer", "warmup_steps"), f"{warmup} is above steps, {steps}", "the warm-up must end within the run")
        )
    return problems


def _init_problems(config: Mapping[str, Any]) -> list[Problem]:
    init_from = config.get("init_from")
    if not isinstance(init_from, Mapping) or "path" in init_from:
        return []
    return [(("init_from",), "has no path", "set init_from: {path: RUN, strict: false}")]


def _keep_problems(config: Mapping[str, Any]) -> list[Problem]:
    checkpoint, evaluation = config.get("checkpoint"), config.get("eval")
    keep = checkpoint.get("keep") if isinstance(checkpoint, Mapping) else None
    best = keep.get("best", 0) if isinstance(keep, Mapping) else 0
    if not best or not isinstance(evaluation, Mapping) or evaluation.get("every") != 0:
        return []
    return [(("checkpoint", "keep", "best"), "needs evaluations, and eval.every is 0", "set eval.every")]


def _sample_problems(config: Mapping[str, Any]) -> list[Problem]:
    evaluation, model = config.get("eval"), config.get("model", {})
    samples = evaluation.get("samples", 0) if isinstance(evaluation, Mapping) else 0
    if not isinstance(evaluation, Mapping) or not samples or not FIELDS["eval"]["samples"].holds(samples):
        return []
    if evaluation.get("every") == 0:
        return [(("eval", "samples"), "needs evaluations, and eval.every is 0", "set eval.every")]
    if config.get("parallel") == "fsdp":
        wrong = "is not available with parallel: fsdp, where no rank has the whole model"
        return [(("eval", "samples"), wrong, "set eval.samples: 0")]
    wrong = no_samples_of(model.get("name", "gpt"), model.get("task", "auto")) if isinstance(model, Mapping) else ""
    return [(("eval", "samples"), wrong, "set eval.samples: 0")] if wrong else []


def no_samples_of(name: object, task: object) -> str:
    """Return why a model has no samples in evaluations, or an empty text if it has."""
    if is_code(name):
        return f"is not available for a custom model ({name}), whose outputs are unknown"
    if task == "masked-lm" or (isinstance(name, str) and name.startswith("bert")):
        return f"is not available for {name}, which predicts hidden tokens and continues no text"
    return ""


def _logger_problems(config: Mapping[str, Any]) -> list[Problem]:
    names = config.get("loggers", ())
    problems: list[Problem] = []
    for index, name in enumerate(names if isinstance(names, (list, tuple)) else ()):
        if name not in LOGGER_NAMES:
            known = f"use {', '.join(LOGGER_NAMES)}"
            problems.append(
                (("loggers", index), f"unknown logger {shown(name)}", did_you_mean(str(name), LOGGER_NAMES) or known)
            )
        elif name in names[:index]:
            problems.append((("loggers", index), f"{name} is listed twice", "remove one of them"))
    return problems


def _graph_problems(config: Mapping[str, Any]) -> list[Problem]:
    if config.get("cuda_graphs") is not True:
        return []
    if config.get("parallel") == "fsdp":
        wrong = "true is not available with parallel: fsdp, which gathers parameters at other addresses in each pass"
        return [(("cuda_graphs",), wrong, "set cuda_graphs: false, or parallel: ddp")]
    if config.get("compile") is False:
        return [(("cuda_graphs",), "true needs the compiler", "set compile: true, or auto")]
    return []

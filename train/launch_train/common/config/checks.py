"""Validate `run.config`: each key by its rule, and the combinations of keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from launch_train.common.config.rules import Problem, Rule, check, either, number, one_of, shown, whole
from launch_train.common.config.settings import DEFAULT, PRESETS, Gpt, kind_of
from launch_train.common.contract import LOGGER_NAMES
from launch_train.common.text import did_you_mean


def problems(config: Mapping[str, Any]) -> list[Problem]:
    """Return all problems of `config`, in the order of its keys; empty if it is valid."""
    long = expand_short_forms(config)
    found = [
        *check(long, _FIELDS, ()),
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
    return [(path[:1] if path[0] in short else path, wrong, right) for path, wrong, right in found]


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


# --- The rules ------------------------------------------------------------------------------------------------------


def _is_betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(number(0, 0.9999).holds(v) for v in value)


MOST_SAMPLES: Final = 16
"""Most `eval.samples`: each evaluation stores them in the run folder."""

_CODE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_HUGGING_FACE = r"^hf:[\w.-]+(/[\w.-]+)?$"
FOREIGN_OWN: Final = ("pretrained", "task")
"""Keys of an external model that belong to the trainer; all others are passed to the model."""

_FLAG = one_of(True, False)


def _is_path(value: Any) -> bool:
    """Return whether a value is a path, a gs:// URL or a data set of the Hugging Face hub."""
    if not isinstance(value, str) or not value.strip():
        return False
    if value.startswith("hf:"):
        return bool(re.match(_DATASET, value))
    return not re.match(_SCHEME, value) or bool(re.match(_BUCKET, value))


_SCHEME = r"^[A-Za-z][A-Za-z0-9+.-]*:/"
_BUCKET = r"^gs://[a-z0-9][\w.-]*[a-z0-9](/|$)"
_RUN_ID = r"^[a-z][a-z0-9-]*-[0-9a-f]{8}(-\d+)?$"
"""A run's ID, as launch makes it. It must be told from a local path, so one that --run-id set needs its folder."""
_WEIGHTS = Rule(
    lambda v: _is_path(v) and (not v.startswith("hf:") or bool(re.match(_HUGGING_FACE, v))),
    "a run's ID (NAME-1a2b3c4d), gs://BUCKET/…, hf:ORG/NAME, or a local folder or file (launch local only)",
)
_DATASET = r"^hf:[\w.-]+/[\w.-]+(@[\w.-]+)?(/.+)?$"
_PATH = Rule(
    _is_path, "python-stdlib, synthetic, a file or a folder, gs://BUCKET/…, hf:ORG/NAME, or a custom my_pkg.data:build"
)
_GPT: Final[dict[str, Any]] = {
    "name": one_of(*PRESETS),
    "n_layer": whole(1, 1000),
    "n_head": whole(1, 1000),
    "n_embd": whole(1, 100_000),
    "block_size": whole(2, 1_000_000),
    "vocab_size": whole(2, 10_000_000),
    "bias": _FLAG,
    "dropout": number(0, 0.99),
}
_BERT: Final[dict[str, Any]] = {
    **{name: rule for name, rule in _GPT.items() if name != "bias"},
    "masked": number(0.01, 0.9),
}
_RESNET: Final[dict[str, Any]] = {
    "name": one_of(*PRESETS),
    "num_classes": whole(2, 1_000_000),
    "image_size": whole(32, 4096),
    "width": whole(1, 4096),
}
_FOREIGN: Final[dict[str, Any]] = {
    "pretrained": _FLAG,
    "task": one_of("auto", "causal-lm", "masked-lm", "image-classification"),
}
_MAPPING = Rule(lambda v: isinstance(v, Mapping), "a mapping of the arguments of your function")
_FIELDS: Final[dict[str, Any]] = {
    "model": Rule(lambda v: isinstance(v, Mapping), "a name or a mapping with a name"),
    "data": {
        "path": _PATH,
        "train": _PATH,
        "val": Rule(
            lambda v: _is_path(v) and v != "synthetic" and not _is_code(v), "a file or a folder, or gs://BUCKET/…"
        ),
        "tokenizer": Rule(
            lambda v: _is_path(v) and not v.startswith("hf:"),
            "bytes, a tokenizer.json (also gs://BUCKET/…), or tiktoken:ENCODING",
        ),
        "column": Rule(lambda v: isinstance(v, str) and bool(v), "the name of a column, such as content"),
        "dtype": one_of("uint8", "uint16", "uint32", "int32", "int64"),
        "block_size": whole(2, 1_000_000),
        "image_size": whole(8, 4096),
        "settings": _MAPPING,
    },
    "loss": Rule(lambda v: isinstance(v, str) and bool(re.match(_CODE, v)), "a custom function, my_pkg.losses:loss"),
    "steps": whole(1, 1_000_000_000),
    "batch_size": whole(1, 10_000_000),
    "micro_batch_size": either(one_of("auto"), whole(1, 10_000_000)),
    "optimizer": {
        "name": one_of("adamw", "sgd"),
        "lr": number(0, 1000, above=True),
        "min_lr": number(0, 1000),
        "warmup_steps": whole(0, 1_000_000_000),
        "weight_decay": number(0, 1000),
        "grad_clip": number(0, 1e9),
        "betas": Rule(_is_betas, "two numbers from 0 to 0.9999, such as [0.9, 0.95]"),
        "momentum": number(0, 0.9999),
        "fused": one_of("auto", True, False),
    },
    "precision": one_of("auto", "bf16", "fp16", "tf32", "fp32"),
    "attention": one_of("auto", "flash", "efficient", "cudnn", "math"),
    "compile": one_of("auto", True, False, "whole"),
    "deterministic": one_of("auto", True, False),
    "cuda_graphs": _FLAG,
    "channels_last": one_of("auto", True, False),
    "activation_checkpointing": one_of("none", "selective", "full"),
    "parallel": one_of("ddp", "fsdp"),
    "ddp": {
        "bucket_mib": either(one_of("auto"), whole(1, 10_000)),
        "static_graph": one_of("auto", True, False),
        "gradient_as_bucket_view": _FLAG,
    },
    "loader": {"workers": either(one_of("auto"), whole(0, 256)), "prefetch": whole(1, 64)},
    "seed": whole(0, 2**63 - 1),
    "eval": {
        "every": whole(0, 1_000_000_000),
        "batches": whole(1, 1_000_000),
        "samples": whole(0, MOST_SAMPLES),
    },
    "log_every": whole(1, 1_000_000),
    "loggers": Rule(lambda v: isinstance(v, (list, tuple)), f"a list of {', '.join(LOGGER_NAMES)}"),
    "checkpoint": {
        "minutes": either(one_of("auto", "off"), number(0, 1e6, above=True)),
        "keep": {
            "last": whole(1, 1_000_000),
            "every": whole(0, 1_000_000_000),
            "best": whole(0, 1_000_000),
            "metric": one_of("eval_loss"),
        },
    },
    "init_from": {"path": _WEIGHTS, "strict": _FLAG, "step": whole(1, 1_000_000_000)},
    "non_finite": whole(0, 1_000_000),
    "monitor": number(0, 3600),
    "hang_after": either(one_of("auto", "off"), number(1, 604_800)),
    "profile": Rule(
        lambda v: v in ("off", False) or (isinstance(v, Mapping) and not check(v, _PROFILE, ())),
        "off, or {wait: 5, warmup: 2, active: 3}",
    ),
}
_PROFILE: Final[dict[str, Any]] = {"wait": whole(0, 1_000_000), "warmup": whole(0, 1000), "active": whole(1, 1000)}


# --- Combinations of keys; each function skips values that their own rule rejects -----------------------------------


def is_foreign(name: object) -> bool:
    """Return whether a model's name is one of transformers', or a user function."""
    return isinstance(name, str) and bool(re.match(_HUGGING_FACE, name) or re.match(_CODE, name))


def user_functions(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user functions that a config names, by key: `model`, `data`, `loss`."""
    long = expand_short_forms(config)
    model, data = ({} if not isinstance(long.get(key), Mapping) else long[key] for key in ("model", "data"))
    found = {"model": model.get("name"), "data": training_path(data), "loss": long.get("loss")}
    return {key: name for key, name in found.items() if _is_code(name)}


def local_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the local files and folders that a config names, by key (`data`, `data.val`, `init_from` …)."""
    long = expand_short_forms(config)
    data, weights = (long[key] if isinstance(long.get(key), Mapping) else {} for key in ("data", "init_from"))
    named = {"data": training_path(data), "data.val": data.get("val"), "data.tokenizer": data.get("tokenizer")}
    found = {key: path for key, path in named.items() if isinstance(path, str) and not _is_not_local(path)}
    path = weights.get("path")
    return found | ({"init_from": path} if isinstance(path, str) and kind_of_weights(path) == "local" else {})


def kind_of_weights(path: str) -> str:
    """Return `run`, `bucket`, `hub` or `local`: where `init_from` finds its weights."""
    kinds = {"bucket": path.startswith("gs://"), "hub": path.startswith("hf:"), "run": bool(re.match(_RUN_ID, path))}
    return next((kind for kind, holds in kinds.items() if holds), "local")


def training_path(data: Mapping[str, Any]) -> Any:
    """Return `path`, or `train`, which means the same; None if neither is set."""
    return data.get("path", data.get("train"))


def _is_not_local(path: str) -> bool:
    known = path in ("bytes", "synthetic", "python-stdlib") or path.startswith(("gs://", "hf:", "tiktoken:"))
    return known or _is_code(path)


def _is_code(name: object) -> bool:
    return isinstance(name, str) and bool(re.match(_CODE, name)) and not re.match(_HUGGING_FACE, name)


def _model_problems(config: Mapping[str, Any]) -> list[Problem]:
    given = config.get("model", {})
    if not isinstance(given, Mapping):
        return []
    name = given.get("name", "gpt")
    if is_foreign(name):
        return check({key: value for key, value in given.items() if key in _FOREIGN}, _FOREIGN, ("model",))
    if not isinstance(name, str) or name not in PRESETS:
        known = f"the models are {', '.join(PRESETS)}, hf:TYPE (transformers), or a custom my_pkg.model:build"
        if not isinstance(name, str):
            return [(("model", "name"), f"{shown(name)} is not a model name", known)]
        return [(("model", "name"), f"unknown model {shown(name)}", did_you_mean(name, PRESETS) or known)]
    return check(given, _rules(name), ("model",)) or _head_problems(given)


def _rules(name: str) -> dict[str, Any]:
    return {"resnet50": _RESNET}.get(name) or (_GPT if kind_of(name) is Gpt else _BERT)


def _head_problems(given: Mapping[str, Any]) -> list[Problem]:
    shape = _with_defaults(given)
    if "n_head" not in shape or shape["n_embd"] % shape["n_head"] == 0:
        return []
    wrong = f"{shape['n_embd']} is not divisible by n_head, {shape['n_head']}"
    return [(("model", "n_embd"), wrong, "each head needs the same number of channels")]


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a built-in model."""
    name = given.get("name", "gpt")
    return {**kind_of(name)()._asdict(), **PRESETS[name], **given}


def _data_problems(config: Mapping[str, Any]) -> list[Problem]:
    data, given = config.get("data", {}), config.get("model", {})
    if not isinstance(given, Mapping) or _model_problems(config) or check({"data": data}, _FIELDS, ()):
        return []
    path = training_path(data) or "the default"
    if found := _path_problems(data, path):
        return found
    if is_foreign(given.get("name", "gpt")) or path == "synthetic" or re.match(_CODE, path):
        return []
    model = _with_defaults(given)
    if path == "python-stdlib" and "num_classes" in model:
        return [(("data",), "python-stdlib is text, but resnet50 needs images", "use a folder of images, or synthetic")]
    if data.get("tokenizer", "bytes") == "bytes" and not _may_be_tokens(path) and model.get("vocab_size", 256) < 256:
        wrong = f"{model['vocab_size']} is too small"
        return [(("model", "vocab_size"), wrong, "text is read as bytes: use at least 256")]
    return []


def _path_problems(data: Mapping[str, Any], path: str) -> list[Problem]:
    if "path" in data and "train" in data:
        return [(("data", "train"), "means the same as path, which is also set", "remove one of them")]
    if "settings" in data and not re.match(_CODE, path):
        return [(("data", "settings"), "only applies to a custom function", "set path: my_pkg.data:build")]
    if "val" in data and (path in ("the default", "synthetic") or re.match(_CODE, path)):
        wrong = f"needs a file or a folder to train on, and the data is {path}"
        return [(("data", "val"), wrong, "set data.train; a custom function gets split='held_out'")]
    return []


def _may_be_tokens(path: str) -> bool:
    """Return whether a path may be files of tokens, of any vocabulary: by its suffix, or because it has none."""
    name = path.rstrip("/").rpartition("/")[2].lower()
    return path not in ("the default", "python-stdlib") and ("." not in name or name.endswith((".bin", ".npy")))


def _batch_problems(config: Mapping[str, Any]) -> list[Problem]:
    batch, micro = config.get("batch_size", DEFAULT.batch_size), config.get("micro_batch_size", "auto")
    if micro == "auto" or not _FIELDS["batch_size"].holds(batch) or not _FIELDS["batch_size"].holds(micro):
        return []
    if batch % micro == 0:
        return []
    wrong = f"batch_size, {batch}, is not divisible by {micro}"
    return [(("micro_batch_size",), wrong, "batch_size is global: a multiple of ranks x micro_batch_size")]


def _optimizer_problems(config: Mapping[str, Any]) -> list[Problem]:
    given, steps = config.get("optimizer", {}), config.get("steps", DEFAULT.steps)
    if not isinstance(given, Mapping):
        return []
    rules, found = _FIELDS["optimizer"], list[Problem]()
    lr, low, warmup = (given.get("lr", DEFAULT.optimizer.lr), given.get("min_lr"), given.get("warmup_steps"))
    if rules["lr"].holds(lr) and rules["min_lr"].holds(low) and low > lr:
        found.append((("optimizer", "min_lr"), f"{low} is above lr, {lr}", "the learning rate falls from lr to min_lr"))
    if rules["warmup_steps"].holds(warmup) and _FIELDS["steps"].holds(steps) and warmup > steps:
        found.append(
            (("optimizer", "warmup_steps"), f"{warmup} is above steps, {steps}", "the warm-up must end within the run")
        )
    return found


def _init_problems(config: Mapping[str, Any]) -> list[Problem]:
    given = config.get("init_from")
    if not isinstance(given, Mapping) or "path" in given:
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
    given, model = config.get("eval"), config.get("model", {})
    asked = given.get("samples", 0) if isinstance(given, Mapping) else 0
    if not isinstance(given, Mapping) or not asked or not _FIELDS["eval"]["samples"].holds(asked):
        return []
    if given.get("every") == 0:
        return [(("eval", "samples"), "needs evaluations, and eval.every is 0", "set eval.every")]
    if config.get("parallel") == "fsdp":
        wrong = "is not available with parallel: fsdp, where no rank has the whole model"
        return [(("eval", "samples"), wrong, "set eval.samples: 0")]
    wrong = no_samples_of(model.get("name", "gpt"), model.get("task", "auto")) if isinstance(model, Mapping) else ""
    return [(("eval", "samples"), wrong, "set eval.samples: 0")] if wrong else []


def no_samples_of(name: object, task: object) -> str:
    """Return why a model has no samples in evaluations, or an empty text if it has."""
    if _is_code(name):
        return f"is not available for a custom model ({name}), whose outputs are unknown"
    if task == "masked-lm" or (isinstance(name, str) and name.startswith("bert")):
        return f"is not available for {name}, which predicts hidden tokens and continues no text"
    return ""


def _logger_problems(config: Mapping[str, Any]) -> list[Problem]:
    names = config.get("loggers", ())
    found: list[Problem] = []
    for index, name in enumerate(names if isinstance(names, (list, tuple)) else ()):
        if name not in LOGGER_NAMES:
            known = f"use {', '.join(LOGGER_NAMES)}"
            found.append(
                (("loggers", index), f"unknown logger {shown(name)}", did_you_mean(str(name), LOGGER_NAMES) or known)
            )
        elif name in names[:index]:
            found.append((("loggers", index), f"{name} is listed twice", "remove one of them"))
    return found


def _graph_problems(config: Mapping[str, Any]) -> list[Problem]:
    if config.get("cuda_graphs") is not True:
        return []
    if config.get("parallel") == "fsdp":
        wrong = "true is not available with parallel: fsdp, which gathers parameters at other addresses in each pass"
        return [(("cuda_graphs",), wrong, "set cuda_graphs: false, or parallel: ddp")]
    if config.get("compile") is False:
        return [(("cuda_graphs",), "true needs the compiler", "set compile: true, or auto")]
    return []

"""The built-in trainer's settings, `run.config` of a spec: what they are, their defaults, and what is wrong with them.

The launcher calls `problems` before a spec costs anything, the trainer calls `parse`. Standard library only, and quick
to import (a named tuple's class is made in an eighth of a frozen dataclass's time). Every key has a default: an empty
config trains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from train.errors import ConfigError
from train.rules import Problem, Rule, check, either, number, one_of, shown, suggestion, whole

Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]


class Gpt(NamedTuple):
    """A GPT in nanoGPT's shape."""

    name: str = "gpt"
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    vocab_size: int = 256
    bias: bool = False
    dropout: float = 0.0


class ResNet(NamedTuple):
    """ResNet-50 (v1.5) in torchvision's shape. `width` is the channels of the first layer: 64 is the real one."""

    name: str = "resnet50"
    num_classes: int = 1000
    image_size: int = 224
    width: int = 64


class Optimizer(NamedTuple):
    """AdamW or SGD, with a warm-up and a cosine down to `min_lr`."""

    name: str = "adamw"
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9


class Eval(NamedTuple):
    """Every how many steps (0: never) and on how many global batches of held-out data."""

    every: int = 100
    batches: int = 20


class Checkpoint(NamedTuple):
    """`minutes` between checkpoints (auto: by Young's rule; off: only when preempted and at the end), how many of the
    last to keep, and every how many steps one is kept for good (0: none)."""

    minutes: float | Literal["auto", "off"] = "auto"
    keep_last: int = 3
    keep_every: int = 0


class Config(NamedTuple):
    """All of `run.config`, checked and complete."""

    model: Gpt | ResNet = Gpt()
    data: str = "python-stdlib"
    steps: int = 300
    batch_size: int = 24
    micro_batch_size: int | None = None
    optimizer: Optimizer = Optimizer()
    precision: Precision = "auto"
    compile: bool | None = None
    seed: int = 1337
    eval: Eval = Eval()
    log_every: int = 10
    checkpoint: Checkpoint = Checkpoint()


DEFAULT: Final = Config()
"""What an empty config means."""

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "gpt": {},
    "gpt2-124m": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "block_size": 1024, "vocab_size": 50304},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280, "block_size": 1024, "vocab_size": 50304},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024, "vocab_size": 50304},
    "resnet50": {},
}
"""Models by name. GPT-2's vocabulary of 50257 is padded to 50304, a multiple of 64, as nanoGPT does."""


def parse(config: Mapping[str, Any]) -> Config:
    """The settings with their defaults. Raises ConfigError with all problems."""
    found = problems(config)
    if found:
        raise ConfigError("run.config can't be used:\n" + "\n".join(f"  {line(problem)}" for problem in found))
    config = _spelled_out(config)
    model = _model(config.get("model", "gpt"))
    steps = config.get("steps", DEFAULT.steps)
    return Config(
        model=model,
        data=config.get("data", _default_data(model)),
        steps=steps,
        batch_size=config.get("batch_size", DEFAULT.batch_size),
        micro_batch_size=_unless_auto(config.get("micro_batch_size", "auto")),
        optimizer=_optimizer(config.get("optimizer", {}), steps),
        precision=config.get("precision", "auto"),
        compile=_unless_auto(config.get("compile", "auto")),
        seed=config.get("seed", DEFAULT.seed),
        eval=Eval(**config.get("eval", {})),
        log_every=config.get("log_every", DEFAULT.log_every),
        checkpoint=_checkpoint(config.get("checkpoint", {})),
    )


def problems(config: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with `config`, in the order of its keys; empty if it can be used."""
    return [
        *check(_spelled_out(config), _FIELDS, ()),
        *_model_problems(config),
        *_data_problems(config),
        *_batch_problems(config),
        *_optimizer_problems(config),
    ]


def line(problem: Problem) -> str:
    """One problem as a line of text."""
    path, wrong, right = problem
    return f"{'.'.join(map(str, path)) or 'run.config'}: {wrong}" + (f"; {right}" if right else "")


def as_data(config: Config) -> dict[str, Any]:
    """All settings as plain data, the sections as mappings."""
    return {
        name: value._asdict() if isinstance(value, Gpt | ResNet | Optimizer | Eval | Checkpoint) else value
        for name, value in config._asdict().items()
    }


# --- The rules ------------------------------------------------------------------------------------------------------


def _is_betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(number(0, 0.9999).holds(v) for v in value)


_FLAG = one_of(True, False)
_DATA = Rule(lambda v: isinstance(v, str) and v.strip() != "", "python-stdlib, synthetic, a file or a folder")
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
_RESNET: Final[dict[str, Any]] = {
    "name": one_of(*PRESETS),
    "num_classes": whole(2, 1_000_000),
    "image_size": whole(32, 4096),
    "width": whole(1, 4096),
}
_FIELDS: Final[dict[str, Any]] = {
    "model": None,  # a name or a mapping: _model_problems
    "data": _DATA,
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
    },
    "precision": one_of("auto", "bf16", "fp16", "tf32", "fp32"),
    "compile": one_of("auto", True, False),
    "seed": whole(0, 2**63 - 1),
    "eval": {"every": whole(0, 1_000_000_000), "batches": whole(1, 1_000_000)},
    "log_every": whole(1, 1_000_000),
    "checkpoint": {
        "minutes": either(one_of("auto", "off"), number(0, 1e6, above=True)),
        "keep": {"last": whole(1, 1_000_000), "every": whole(0, 1_000_000_000)},
    },
    "profile": one_of("off", False),
}


# --- What has to fit together; each function passes over a value that its own rule has refused ----------------------

_CODE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def _model_problems(config: Mapping[str, Any]) -> list[Problem]:
    given = config.get("model", "gpt")
    if isinstance(given, str):
        return [] if given in PRESETS else [(("model",), *_unknown_model(given))]
    if not isinstance(given, Mapping):
        return [(("model",), f"{shown(given)} can't be used", "it must be a name or a mapping with a name")]
    name = given.get("name", "gpt")
    if not isinstance(name, str) or name not in PRESETS:
        return [(("model", "name"), *_unknown_model(name))]
    return check(given, _RESNET if name == "resnet50" else _GPT, ("model",)) or _head_problems(given)


def _unknown_model(name: object) -> tuple[str, str]:
    known = f"the models are {', '.join(PRESETS)}"
    if not isinstance(name, str):
        return f"{shown(name)} is no model's name", known
    if name.startswith("hf:") or _CODE.match(name):
        return f"{name} is not in this version", known
    return f"there is no model {shown(name)}", suggestion(name, PRESETS)


def _head_problems(given: Mapping[str, Any]) -> list[Problem]:
    shape = _model(given)
    if isinstance(shape, ResNet) or shape.n_embd % shape.n_head == 0:
        return []
    wrong = f"{shape.n_embd} is not divisible by n_head, {shape.n_head}"
    return [(("model", "n_embd"), wrong, "each head needs the same number of channels")]


def _data_problems(config: Mapping[str, Any]) -> list[Problem]:
    if _model_problems(config) or not _DATA.holds(config.get("data", "the default")):
        return []
    model = _model(config.get("model", "gpt"))
    data = config.get("data", _default_data(model))
    if data.startswith(("gs://", "hf:")) or _CODE.match(data):
        return [(("data",), f"{data} is not in this version", f"it must be {_DATA.words}")]
    if data == "synthetic":
        return []
    if isinstance(model, ResNet):
        return [(("data",), f"{shown(data)} is text, and resnet50 takes images", "in this version: synthetic")]
    if model.vocab_size < 256:
        return [(("model", "vocab_size"), f"{model.vocab_size} is too small", "text is read as bytes: at least 256")]
    return []


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
        found.append((("optimizer", "min_lr"), f"{low} is above lr, {lr}", "the rate falls from lr to min_lr"))
    if rules["warmup_steps"].holds(warmup) and _FIELDS["steps"].holds(steps) and warmup > steps:
        found.append((("optimizer", "warmup_steps"), f"{warmup} is above steps, {steps}", "the warm-up has to end"))
    return found


# --- Defaults that depend on other settings -------------------------------------------------------------------------


def _model(given: str | Mapping[str, Any]) -> Gpt | ResNet:
    values = {"name": given} if isinstance(given, str) else {"name": "gpt", **given}
    kind = ResNet if values["name"] == "resnet50" else Gpt
    return kind(**{**PRESETS[values["name"]], **values})


def _default_data(model: Gpt | ResNet) -> str:
    return "python-stdlib" if isinstance(model, Gpt) else "synthetic"


def _optimizer(given: Mapping[str, Any], steps: int) -> Optimizer:
    """A short run warms up for a tenth of its steps, and `min_lr` is a tenth of `lr`, unless said otherwise."""
    lr = given.get("lr", DEFAULT.optimizer.lr)
    optimizer = Optimizer(min_lr=lr / 10, warmup_steps=min(DEFAULT.optimizer.warmup_steps, steps // 10))
    return optimizer._replace(**{**given, "betas": tuple(given.get("betas", DEFAULT.optimizer.betas))})


def _spelled_out(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`checkpoint: auto` (or off) is short for `checkpoint: {minutes: auto}`."""
    short = config.get("checkpoint") in ("auto", "off")
    return {**config, "checkpoint": {"minutes": config["checkpoint"]}} if short else config


def _checkpoint(given: Mapping[str, Any]) -> Checkpoint:
    keep, default = given.get("keep", {}), DEFAULT.checkpoint
    last, every = keep.get("last", default.keep_last), keep.get("every", default.keep_every)
    return Checkpoint(given.get("minutes", default.minutes), last, every)


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value

"""The built-in trainer's settings, `run.config` of a spec: validation, defaults, parsing.

The launcher calls `problems` before a spec costs anything, the trainer calls `parse`. Standard library only, and quick
to import. Every key has a default: an empty config trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch_train.common.config.checks import (
    expand_short_forms,
    line,
    local_paths,
    problems,
    training_path,
    user_functions,
)
from launch_train.common.config.rules import is_foreign
from launch_train.common.config.settings import (
    CHANGEABLE,
    DEFAULT,
    PRESETS,
    SECTIONS,
    Attention,
    Bert,
    Checkpoint,
    Checkpointing,
    Config,
    Data,
    Ddp,
    Eval,
    ExternalModel,
    Gpt,
    InitFrom,
    Loader,
    Optimizer,
    Parallel,
    Precision,
    Profile,
    ResNet,
    Shape,
    fields_of,
    kind_of,
    without_auto,
)
from launch_train.common.errors import ConfigError

__all__ = [
    "CHANGEABLE",
    "DEFAULT",
    "PRESETS",
    "Attention",
    "Bert",
    "Checkpoint",
    "Checkpointing",
    "Config",
    "Data",
    "Ddp",
    "Eval",
    "ExternalModel",
    "Gpt",
    "InitFrom",
    "Loader",
    "Optimizer",
    "Parallel",
    "Precision",
    "Profile",
    "ResNet",
    "Shape",
    "as_data",
    "is_resumable",
    "line",
    "local_paths",
    "parse",
    "problems",
    "user_functions",
]


def parse(config: Mapping[str, Any]) -> Config:
    """Return the settings with their defaults. Raises ConfigError with all problems."""
    lines = [line(problem) for problem in problems(config)]
    if len(lines) == 1:
        raise ConfigError(f"invalid run.config: {lines[0]}")
    if lines:
        raise ConfigError("invalid run.config:\n" + "\n".join(f"  {text}" for text in lines))
    config = expand_short_forms(config)
    model = _model(config.get("model", {"name": "gpt"}))
    steps = config.get("steps", DEFAULT.steps)
    checkpoint, default = config.get("checkpoint", {}), DEFAULT.checkpoint
    keep = {f"keep_{name}": value for name, value in checkpoint.get("keep", {}).items()}
    optimizer = without_auto(Optimizer, config.get("optimizer", {}))
    optimizer["betas"] = tuple(optimizer.get("betas", DEFAULT.optimizer.betas))
    lr = optimizer.get("lr", DEFAULT.optimizer.lr)
    sections = {
        "model": model,
        "data": _data(config.get("data", {}), model),
        "optimizer": Optimizer(**{"min_lr": lr / 10, "warmup_steps": default_warmup(steps), **optimizer}),
        "loggers": tuple(config.get("loggers", DEFAULT.loggers)),
        "ddp": Ddp(**without_auto(Ddp, config.get("ddp", {}))),
        "loader": Loader(**without_auto(Loader, config.get("loader", {}))),
        "eval": Eval(**config.get("eval", {})),
        "checkpoint": default._replace(minutes=checkpoint.get("minutes", default.minutes), **keep),
        "profile": Profile(**config["profile"]) if config.get("profile", "off") not in ("off", False) else None,
        "init_from": InitFrom(**config["init_from"]) if "init_from" in config else None,
    }
    return Config(**{**without_auto(Config, config), **sections})


def as_data(config: Config) -> dict[str, Any]:
    """Return all settings as plain data, the sections as mappings."""
    return {
        name: {key: dict(item) if isinstance(item, Mapping) else item for key, item in value._asdict().items()}
        if isinstance(value, SECTIONS)
        else value
        for name, value in config._asdict().items()
    }


# --- Resume ---------------------------------------------------------------------------------------------------------


def is_resumable(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a run with the config `before` may be resumed with `now`: `steps` may grow, and CHANGEABLE
    settings may change. Both are as in a spec, without defaults."""
    if problems(before) or problems(now):
        return False
    old, new = parse(before), parse(now)
    same = {name: getattr(new, name) for name in CHANGEABLE}
    optimizer = old.optimizer
    if not any("warmup_steps" in config.get("optimizer", {}) for config in (before, now)):
        optimizer = optimizer._replace(warmup_steps=new.optimizer.warmup_steps)
    return new.steps >= old.steps and old._replace(**same, steps=new.steps, optimizer=optimizer) == new


def default_warmup(steps: int) -> int:
    """Return the default of `optimizer.warmup_steps`: at most a tenth of the steps."""
    return min(DEFAULT.optimizer.warmup_steps, steps // 10)


# --- Defaults that depend on other settings -------------------------------------------------------------------------


def _model(settings: Mapping[str, Any]) -> Shape:
    name = settings.get("name", "gpt")
    if is_foreign(name):
        own = {key: settings[key] for key in fields_of(ExternalModel) if key in settings}
        return ExternalModel(name, {key: value for key, value in settings.items() if key not in ("name", *own)}, **own)
    return kind_of(name)(**{**PRESETS[name], **settings, "name": name})


def _data(settings: Mapping[str, Any], model: Shape) -> Data:
    rest = {key: value for key, value in settings.items() if key != "train"}
    default = "python-stdlib" if isinstance(model, Gpt | Bert) else "synthetic"
    return Data(**{**rest, "path": training_path(settings) or default})

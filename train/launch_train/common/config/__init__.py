"""The built-in trainer's settings, `run.config` of a spec: validation, defaults, parsing.

The launcher calls `problems` before a spec costs anything, the trainer calls `parse`. Standard library only, and quick
to import. Every key has a default: an empty config trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch_train.common.config.checks import (
    FOREIGN_OWN,
    expand_short_forms,
    is_foreign,
    line,
    local_paths,
    problems,
    training_path,
    user_functions,
)
from launch_train.common.config.settings import (
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
    kind_of,
)
from launch_train.common.errors import ConfigError

__all__ = [
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
    plain = {name: config[name] for name in _PLAIN if name in config}
    checkpoint, default = config.get("checkpoint", {}), DEFAULT.checkpoint
    keep = {f"keep_{name}": value for name, value in checkpoint.get("keep", {}).items()}
    optimizer = dict(config.get("optimizer", {}))
    optimizer["betas"] = tuple(optimizer.get("betas", DEFAULT.optimizer.betas))
    optimizer["fused"] = _unless_auto(optimizer.get("fused"))
    lr = optimizer.get("lr", DEFAULT.optimizer.lr)
    return Config(
        model=model,
        data=_data(config.get("data", {}), model),
        steps=steps,
        optimizer=Optimizer(**{"min_lr": lr / 10, "warmup_steps": default_warmup(steps), **optimizer}),
        loggers=tuple(config.get("loggers", DEFAULT.loggers)),
        ddp=Ddp(**{name: _unless_auto(value) for name, value in config.get("ddp", {}).items()}),
        loader=Loader(**{name: _unless_auto(value) for name, value in config.get("loader", {}).items()}),
        eval=Eval(**config.get("eval", {})),
        checkpoint=default._replace(minutes=checkpoint.get("minutes", default.minutes), **keep),
        profile=Profile(**config["profile"]) if config.get("profile", "off") not in ("off", False) else None,
        init_from=InitFrom(**config["init_from"]) if "init_from" in config else None,
        **{name: _unless_auto(value) if name in _AUTO else value for name, value in plain.items()},
    )


_AUTO = frozenset({"micro_batch_size", "compile", "deterministic", "channels_last"})
"""Settings for which `auto` becomes None."""
_PLAIN = (
    *_AUTO,
    *("loss", "batch_size", "precision", "attention", "cuda_graphs", "activation_checkpointing", "parallel"),
    *("seed", "log_every", "non_finite", "monitor", "hang_after"),
)


def as_data(config: Config) -> dict[str, Any]:
    """Return all settings as plain data, the sections as mappings."""
    return {
        name: {key: dict(item) if isinstance(item, Mapping) else item for key, item in value._asdict().items()}
        if isinstance(value, SECTIONS)
        else value
        for name, value in config._asdict().items()
    }


# --- Resume ---------------------------------------------------------------------------------------------------------

CHANGEABLE = ("eval", "log_every", "loggers", "checkpoint", "loader", "non_finite", "monitor", "hang_after", "profile")
"""Settings that a resume may change: no step before it would have been computed differently."""


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


def _model(given: Mapping[str, Any]) -> Shape:
    name = given.get("name", "gpt")
    if is_foreign(name):
        own = {key: given[key] for key in FOREIGN_OWN if key in given}
        return ExternalModel(name, {key: value for key, value in given.items() if key not in ("name", *own)}, **own)
    return kind_of(name)(**{**PRESETS[name], **given, "name": name})


def _data(given: Mapping[str, Any], model: Shape) -> Data:
    rest = {key: value for key, value in given.items() if key != "train"}
    default = "python-stdlib" if isinstance(model, Gpt | Bert) else "synthetic"
    return Data(**{**rest, "path": training_path(given) or default})


def _unless_auto(value: Any) -> Any:
    return None if value == "auto" else value

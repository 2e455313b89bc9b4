"""Check models that are not built in: those of transformers (hf:…) and custom ones.

The trainer would otherwise find these errors on the paid machine (train/launch_train/models/hugging_face.py,
train/launch_train/data/__init__.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.catalog import Catalog
from launcher.errors import PlanRefused
from launcher.spec.checks import custom_functions
from launcher.spec.models import JobSpec
from launcher.text import did_you_mean, near

if TYPE_CHECKING:
    from launch_train.common.config import Data, ExternalModel

TOKENS = ("causal-lm", "masked-lm")
"""The tasks whose data is text."""


def check_model(spec: JobSpec, catalog: Catalog) -> None:
    """Check the type of a transformers model, its task, and that a model of text has a block size.

    Raises:
        PlanRefused: the image's transformers has no such type, or the trainer could not build samples for it.
    """
    if not spec.run.is_builtin:
        return
    from launch_train.common.config import ExternalModel, parse

    config = parse(spec.run.config)
    model = config.model
    if not isinstance(model, ExternalModel):
        return
    name = model.name.removeprefix("hf:")
    is_type = name != model.name and "/" not in name and not model.pretrained
    tasks = catalog.transformers_types.get(name) if is_type else None
    image = spec.image
    has_locked_version = not (image.is_custom or image.requirements)
    if is_type and has_locked_version:
        check_type(name, model.task, tasks, catalog)
    has_own_data = "run.config.data" in custom_functions(spec.run)
    if config.data.block_size is None and not has_own_data and is_text(model, config.data, tasks):
        raise PlanRefused(
            f"run.config.data.block_size: required for {model.name}: the number of tokens per sample",
            "Set it: --set run.config.data.block_size=1024",
            field="run.config.data.block_size",
        )


def check_type(name: str, task: str, tasks: tuple[str, ...] | None, catalog: Catalog) -> None:
    """Check that transformers has a type, and that the type has the task. Raises PlanRefused."""
    if tasks is None:
        close = [f"hf:{model_type}" for model_type in near(name, catalog.transformers_types)]
        raise PlanRefused(
            f"run.config.model: unknown transformers model type {name}",
            (did_you_mean(close) + " " if close else "")
            + f"For a model of the Hugging Face Hub use hf:ORG/NAME, or {{name: hf:{name}, pretrained: true}}.",
            field="run.config.model.name",
        )
    if not tasks or task not in ("auto", *tasks):
        raise PlanRefused(
            f"run.config.model: transformers' {name} has no head for {'any task' if task == 'auto' else task}",
            f"Use the task {' or '.join(tasks)}." if tasks else "Train it with a custom script (run.script).",
            field="run.config.model.task",
        )


def is_text(model: ExternalModel, data: Data, tasks: tuple[str, ...] | None) -> bool:
    """Return whether the model certainly takes tokens. `tasks` are those of its type; None if unknown."""
    task = model.task if model.task != "auto" or not tasks else tasks[0]
    if task != "auto":
        return task in TOKENS
    if data.path == "synthetic":  # a model of the hub may be one of images
        return not model.name.startswith("hf:") and data.image_size is None
    return data.path == "python-stdlib" or data.tokenizer != "bytes"

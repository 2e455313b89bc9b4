"""Build models: built-in, transformers and custom ones."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from launch_train.common.config import Bert, Config, ExternalModel, Gpt, ResNet
from launch_train.data.batch import map_tensors, move_to
from launch_train.data.source import Source
from launch_train.data.user_dataset import BatchRequirements
from launch_train.models import bert, gpt, resnet
from launch_train.models.introspection import blocks, check_samples_of, check_vocabulary, count_flops
from launch_train.models.layers import flops_per_token

__all__ = ["blocks", "build_model", "describe", "flops_per_sample", "resolve_task"]


def resolve_task(config: Config) -> Config:
    """Resolve `task: auto` of a transformers model, which decides its head and its data.

    Raises UsageError if there is no such model type, or no head for it.
    """
    shape = config.model
    if not isinstance(shape, ExternalModel) or not shape.name.startswith("hf:"):
        return config
    from launch_train.models import hugging_face

    return config._replace(model=shape._replace(task=hugging_face.task_of(shape)))  # type: ignore[arg-type]  # a known task


def build_model(config: Config, source: Source | None = None) -> nn.Module:
    """Build a newly initialised model on the CPU for the data of `source`. `torch.manual_seed` decides its parameters.

    `model(inputs, targets)` returns the mean loss. Parameter names of custom and transformers models start with
    `model.`.

    Raises UsageError if the model can't be built, or doesn't fit the data.
    """
    shape, judges = config.model, config.loss is None
    if isinstance(shape, ExternalModel):
        return _external(shape, config, source)
    if isinstance(shape, ResNet):
        check_samples_of(source, BatchRequirements(shape.name, "images", shape.num_classes, judges=judges))
        return _with_loss(resnet.ResNetModel(shape), config)
    check_vocabulary(shape.vocab_size, source)
    check_samples_of(source, BatchRequirements(shape.name, "tokens", shape.vocab_size, shape.block_size, judges))
    return _with_loss(gpt.GPT(shape) if isinstance(shape, Gpt) else bert.BertForMasked(shape), config)


def _external(shape: ExternalModel, config: Config, source: Source | None) -> nn.Module:
    if not shape.name.startswith("hf:"):
        from launch_train.models import user_model

        return user_model.build(shape, config.loss)
    from launch_train.models import hugging_face

    return _with_loss(hugging_face.build(shape, config, source), config)


def _with_loss(model: nn.Module, config: Config) -> nn.Module:
    """Add the custom loss, if there is one. It is called with the model's outputs, computed without targets."""
    if config.loss is None:
        return model
    from launch_train.models import user_model

    return user_model.with_loss(model, config.loss)


def describe(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint says of a transformers model, so that it can be built again without the data and the
    hub: `hf`, with its class and its config. Empty for other models."""
    from launch_train.models.hugging_face import TransformersModel

    wrapped = getattr(model, "model", model)  # by a custom loss
    ours = next((module for module in (model, wrapped) if isinstance(module, TransformersModel)), None)
    if ours is None:
        return {}
    theirs: Any = ours.model
    return {"hf": {"class": type(theirs).__name__, "config": json.loads(theirs.config.to_json_string())}}


def flops_per_sample(config: Config, source: Source | None, model: nn.Module) -> float | None:
    """Return the floating-point operations of forward and backward for one sample, or None if unknown."""
    shape = config.model
    if isinstance(shape, Gpt | Bert):
        return flops_per_token(shape, model) * shape.block_size
    if isinstance(shape, ResNet):  # at 224 x 224, 4.09 GMAC forward, as torchvision's ResNet50_Weights
        return count_flops(model, torch.empty(1, 3, shape.image_size, shape.image_size, device="meta"))
    if source is None:
        return None
    batch = source.finish(move_to(source.train(1, slice(0, 1)), torch.device("cpu")))
    return count_flops(model, *map_tensors(batch, lambda tensor: tensor.to("meta"))) or count_flops(model, *batch)

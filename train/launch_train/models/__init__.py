"""The models that the trainer can build: its own, transformers', and the user's."""

from __future__ import annotations

import torch
from torch import nn

from launch_train.common.config import Bert, Config, Foreign, Gpt, ResNet
from launch_train.data.batch import mapped, to
from launch_train.data.source import Source
from launch_train.data.validation import Suits
from launch_train.models import bert, gpt, resnet
from launch_train.models.introspection import blocks, counted, enough, suited

__all__ = ["blocks", "build", "flops_per_sample", "resolved"]


def resolved(config: Config) -> Config:
    """With the head that a model of transformers gets where the spec leaves it open (task: auto): it decides what the
    model is shown, too. Raises UsageError: there is no such type, or no head for it."""
    shape = config.model
    if not isinstance(shape, Foreign) or not shape.name.startswith("hf:"):
        return config
    from launch_train.models import hugging_face

    return config._replace(model=shape._replace(task=hugging_face.task_of(shape)))  # type: ignore[arg-type]


def build(config: Config, source: Source | None = None) -> nn.Module:
    """A freshly initialised model on the CPU, for what `source` gives; `torch.manual_seed` decides its parameters.

    `model(inputs, targets)` is the mean loss. The names of a foreign model's state begin with `model.`.

    Raises UsageError: it can't be made, or it can't take what the source gives.
    """
    shape, judges = config.model, config.loss is None
    if isinstance(shape, Foreign):
        return _foreign(shape, config, source)
    if isinstance(shape, ResNet):
        suited(source, Suits(shape.name, "images", shape.num_classes, judges=judges))
        return _with_loss(resnet.resnet50(shape), config)
    enough(shape.vocab_size, source)
    suited(source, Suits(shape.name, "tokens", shape.vocab_size, shape.block_size, judges))
    return _with_loss(gpt.GPT(shape) if isinstance(shape, Gpt) else bert.BertForMasked(shape), config)


def _foreign(shape: Foreign, config: Config, source: Source | None) -> nn.Module:
    if not shape.name.startswith("hf:"):
        from launch_train.models import user_model

        return user_model.build(shape, config.loss)
    from launch_train.models import hugging_face

    return _with_loss(hugging_face.build(shape, config, source), config)


def _with_loss(model: nn.Module, config: Config) -> nn.Module:
    """With the user's own loss, if there is one: on what the model returns without targets."""
    if config.loss is None:
        return model
    from launch_train.models import user_model

    return user_model.with_loss(model, config.loss)


def flops_per_sample(config: Config, source: Source | None, model: nn.Module) -> float | None:
    """Floating-point operations of forward and backward for one sample; None where they can't be known."""
    shape = config.model
    if isinstance(shape, Gpt):
        return gpt.flops_per_token(shape, model) * shape.block_size
    if isinstance(shape, Bert):
        return bert.flops_per_token(shape, model) * shape.block_size
    if isinstance(shape, ResNet):
        return resnet.flops_per_image(shape, model)
    if source is None:
        return None
    batch = source.finish(to(source.train(1, slice(0, 1)), _CPU))
    return counted(model, *mapped(batch, lambda tensor: tensor.to("meta"))) or counted(model, *batch)


_CPU = torch.device("cpu")

"""Real models on fake tensors: their parameters, what autograd keeps, and the peak of a pass. Nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from launch_train import models
from launch_train.common.config import Config, parse
from launch_train.performance.activation_checkpointing import checkpoint_blocks

CPU = torch.device("cpu")


def resolved(config: Mapping[str, Any]) -> Config:
    """The settings, with the task of a transformers model."""
    return models.resolve_task(parse(config))


def parameters(config: Mapping[str, Any]) -> int:
    """The number of parameters of the real model, built on the meta device."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in models.build_model(resolved(config)).parameters())


def kept(config: Mapping[str, Any], samples: int, *, half: bool) -> int:
    """Bytes that autograd keeps of one pass besides the parameters, each storage once."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        settings = resolved(config)
        model = models.build_model(settings).train()
        own = {id_of(one) for one in (*model.parameters(), *model.buffers())}
        found: dict[int, Any] = {}

        def keep(tensor: Tensor) -> Tensor:
            if id_of(tensor) not in own:
                found[id_of(tensor)] = tensor.untyped_storage()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=half):
            model(*batch(settings, samples))
        return sum(storage.nbytes() for storage in found.values())


def peak(config: Mapping[str, Any], samples: int, *, passes: int = 1) -> int:
    """The peak in bytes of some passes in fp32, by torch's own tracker."""
    from torch.distributed._tools.mem_tracker import MemTracker  # two seconds, for one file of tests

    with FakeTensorMode(allow_non_fake_inputs=True):
        settings = resolved(config)
        model = models.build_model(settings).train()
        checkpoint_blocks(model, settings.activation_checkpointing)
        tracker, data = MemTracker(), batch(settings, samples)
        tracker.track_external(model)
        with tracker:
            for _ in range(passes):
                model(*data).backward()
                tracker.reset_mod_stats()
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


def batch(settings: Config, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of zeros."""
    image = getattr(settings.model, "image_size", None)
    if image:
        return torch.zeros(samples, 3, image, image), torch.zeros(samples, dtype=torch.long)
    length = getattr(settings.model, "block_size", None) or settings.data.block_size
    tokens = torch.zeros(samples, length or 0, dtype=torch.long)
    return tokens, tokens


def id_of(tensor: Tensor | nn.Parameter) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Models of Hugging Face's transformers: by the type of their config (hf:llama), or by their name on the hub
(hf:org/name). Without the prefix `model.` of its parameter names, a state dict loads into transformers' own class."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from launch_train.common.config import Config, ExternalModel
from launch_train.common.errors import UsageError
from launch_train.common.text import did_you_mean, one_line
from launch_train.data.source import Source
from launch_train.data.user_dataset import BatchRequirements
from launch_train.models.hub import only_cached
from launch_train.models.introspection import check_samples_of, check_vocabulary
from launch_train.models.layers import MaskedCrossEntropy

HEADS: Final = {
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "image-classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
"""For each task, transformers' class that builds a model, and its table of model types with such a head."""

LEGACY: Final = ("rope_theta", "rope_scaling")
"""Old setting names that configs with `rope_parameters` still accept."""
NOT_THEIRS: Final = frozenset({"dtype", "architectures", "transformers_version", "return_dict", "output_hidden_states"})
"""Fields of every config that a spec may not set. Parameters are always float32, whatever the run's precision."""


def build(shape: ExternalModel, config: Config, source: Source | None) -> nn.Module:
    """Build a transformers model with the head for its task.

    Raises UsageError if transformers isn't installed, doesn't know the type or a setting, has no such head for the
    type, or the model doesn't fit the data.
    """
    library, name = _transformers(), shape.name.removeprefix("hf:")
    _skip_packing_search()
    task, (cached, kind) = task_of(shape), _config_class(shape)
    of_data = {"num_labels": getattr(source, "num_classes", None), "image_size": config.data.image_size}
    of_data = {name: value for name, value in of_data.items() if value} if task == "image-classification" else {}
    settings = {**of_data, **shape.settings}
    with _explained_errors(shape):
        if _is_of_hub(shape):
            from_hub = library.AutoConfig.from_pretrained
            theirs: Any = from_hub(name, local_files_only=cached, trust_remote_code=False, **settings)
        else:
            theirs = kind(**settings)
    if getattr(theirs, "is_encoder_decoder", False):
        raise UsageError(
            f"model: {shape.name} has an encoder and a decoder, which the trainer's data does not support: a custom "
            "model (my_pkg.model:build) or a script (run.script) can train it"
        )
    if hasattr(theirs, "use_cache"):
        theirs.use_cache = False
    if task == "causal-lm" and hasattr(theirs, "is_decoder"):
        theirs.is_decoder = True  # so that a token doesn't attend to later ones
    if task == "image-classification":
        _check_images(shape, theirs, source)
        check_samples_of(source, BatchRequirements(shape.name, "images", theirs.num_labels, judges=config.loss is None))
    else:
        vocabulary = getattr(theirs.get_text_config(), "vocab_size", None)
        check_vocabulary(vocabulary, source)
        most = getattr(theirs, "max_position_embeddings", None)
        if source is not None and most is not None and source.per_sample > most:
            raise UsageError(
                f"model: {shape.name} takes {most} tokens at most (max_position_embeddings), and data.block_size is "
                f"{source.per_sample}"
            )
        check_samples_of(source, BatchRequirements(shape.name, "tokens", vocabulary, most, config.loss is None))
    head = getattr(library, HEADS[task][0])
    with _explained_errors(shape):  # transformers uses torch's scaled_dot_product_attention if the model supports it
        if not shape.pretrained:
            model = head.from_config(theirs, dtype=torch.float32)
        else:  # missing weights are newly initialised
            model = head.from_pretrained(
                name,
                config=theirs,
                dtype=torch.float32,
                local_files_only=cached,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # a different number of classes gets a new head
            )
    return TransformersModel(model.train(), "pixel_values" if task == "image-classification" else "input_ids")


def task_of(shape: ExternalModel) -> str:
    """Return the model's task, a key of HEADS. auto: masked-lm if available, else the first task. Encoders like BERT
    also have a causal-lm head, but with it each token would attend to the one to be predicted.

    Raises UsageError like `build`, also for an unknown setting: before the data is prepared, which may take long.
    """
    _transformers()
    from transformers.models.auto import modeling_auto

    with _explained_errors(shape):
        _, kind = _config_class(shape)
    _check_settings(shape, kind)
    heads = [task for task, (_, table) in HEADS.items() if kind.model_type in getattr(modeling_auto, table)]
    if shape.task in heads:
        return shape.task
    if shape.task != "auto" or not heads:
        wanted = "head that the trainer knows" if shape.task == "auto" else f"head for {shape.task}"
        has = f"; it has {', '.join(heads)}" if heads else f" ({', '.join(HEADS)})"
        raise UsageError(f"model: {shape.name}: transformers' {kind.model_type} has no {wanted}{has}")
    return "masked-lm" if "masked-lm" in heads else heads[0]


class TransformersModel(nn.Module):
    """A transformers model with the trainer's loss: targets are already shifted, and targets of -100 are ignored.

    Inputs are tokens [batch, time], images [batch, 3, height, width], or a mapping of the model's keyword arguments.
    """

    def __init__(self, model: nn.Module, takes: str) -> None:
        super().__init__()
        self.model, self.takes, self.loss = model, takes, MaskedCrossEntropy()

    def forward(self, inputs: Any, targets: Tensor | None = None) -> Tensor:
        named = inputs if isinstance(inputs, Mapping) else {self.takes: inputs}
        logits: Tensor = self.model(**named).logits
        if targets is None:
            return logits
        loss: Tensor = self.loss(logits, targets)
        return loss


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"model: hf:… needs transformers, which can't be imported ({error}): pip install 'gcp-launch[hf]' here, "
            "and transformers in image.requirements for the cloud"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@cache
def _skip_packing_search() -> None:
    """Patch transformers so that it doesn't search the positions for packed sequences.

    The search synchronises with the GPU in each pass, and makes a compiled model use a mask instead of the causal
    kernel. Positions that are one row expanded to all samples (stride 0) are the model's own 0 … n - 1, never packed.
    """
    from transformers import masking_utils

    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None:
        return

    def packed(positions: Tensor) -> Any:
        return None if positions.is_meta or positions.stride(0) == 0 else look(positions)

    masking_utils.find_packed_sequence_indices = packed


@contextmanager
def _explained_errors(shape: ExternalModel) -> Iterator[None]:
    """Raise errors of transformers as UsageError with its message."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"model: {shape.name}: transformers can't build it: {one_line(error, 400)}") from error


# --- Config ---------------------------------------------------------------------------------------------------------


def _is_of_hub(shape: ExternalModel) -> bool:
    """Return whether the name is a hub model rather than a type.

    Some hub models have no organisation (distilgpt2); `pretrained` tells them from types, which have no weights.
    """
    return shape.pretrained or "/" in shape.name


def _config_class(shape: ExternalModel) -> tuple[bool, Any]:
    """Return whether the model must be loaded from the local cache, and its config class. Queries the hub once.

    Raises UsageError if transformers has no such type.
    """
    name = shape.name.removeprefix("hf:")
    if _is_of_hub(shape):
        return _config_class_on_hub(name)
    library = _transformers()
    types = library.models.auto.configuration_auto.CONFIG_MAPPING
    if name not in types:
        near = did_you_mean(name, types.keys())
        raise UsageError(
            f"model: hf:{name}: transformers {library.__version__} has no type {name}; {near}{' ' if near else ''}"
            f"a model of the hub is hf:ORG/NAME, or {{name: hf:{name}, pretrained: true}}"
        )
    return False, types[name]


@lru_cache(maxsize=1)
def _config_class_on_hub(name: str) -> tuple[bool, Any]:
    cached = only_cached(name)
    theirs = _transformers().AutoConfig.from_pretrained(name, local_files_only=cached, trust_remote_code=False)
    return cached, type(theirs)


def _check_settings(shape: ExternalModel, kind: Any) -> None:
    """Raise UsageError for an unknown setting, which transformers would accept silently."""
    fields = {field.name: None for field in dataclasses.fields(kind) if field.name not in NOT_THEIRS}
    more = (*kind.attribute_map, "num_labels", *(LEGACY if "rope_parameters" in fields else ()))
    names = {**fields, **dict.fromkeys(more)}
    for name in shape.settings:
        if name not in names:
            said = did_you_mean(name, names) or f"they are transformers' {kind.__name__}'s"
            raise UsageError(f"model.{name}: {shape.name} has no such setting; {said}")


def _check_images(shape: ExternalModel, theirs: Any, source: Source | None) -> None:
    classes, size = getattr(source, "num_classes", None), getattr(source, "image_size", None)
    if classes is not None and classes > theirs.num_labels:
        raise UsageError(
            f"model.num_labels: {theirs.num_labels} is too small for the data, which has {classes} classes"
        )
    takes = getattr(theirs, "image_size", None)
    if size is not None and isinstance(takes, int) and takes != size:
        raise UsageError(
            f"model: {shape.name} takes images of {takes} x {takes}, and the data's are {size} x {size}: "
            f"data: {{image_size: {takes}}}"
        )

"""Training data. The samples of a step depend only on seed and step, not on the number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launch_train.common.config import Bert, Config, Foreign, Gpt, ResNet
from launch_train.common.errors import UsageError
from launch_train.data.masked_lm import Masked, Rows
from launch_train.data.source import Batch, Source
from launch_train.data.synthetic import SyntheticImages, SyntheticTokens
from launch_train.data.text import Text, prepare
from launch_train.data.token_file import Corpus, cache_folder
from launch_train.distributed.process_group import Ranks, gather, run_once_per_node

__all__ = ["Batch", "Source", "open_data"]

_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
IMAGE_SIZE, MASKED, TOKENS, LABELS = 224, 0.15, 256, 2
"""Defaults if neither the model nor the spec sets them: image height and width, the hidden share, and the numbers of
tokens and classes of synthetic data (2 classes is transformers' default)."""


def open_data(config: Config, ranks: Ranks) -> Source:
    """Open the source for `config.data`. The first process of each node prepares it while the others wait.

    Raises on all ranks: UsageError if the data does not exist, is too small, doesn't fit the model, or differs between
    nodes; UnfitError if this machine can't download or store it.
    """
    path = config.data.path
    if _CODE.fullmatch(path):
        return _own(config, ranks)
    if path == "synthetic":
        return _synthetic(config, ranks)
    found = run_once_per_node(ranks, lambda: _prepared(config))
    if len(set(gather(ranks, tuple(part.sha256 for part in found if part is not None)))) > 1:
        raise UsageError(f"data: the nodes read different data at {path}; all need the same")
    if isinstance(found[0], Corpus):
        return _text(config, found[0], ranks)
    return _images(config, *found)


# --- One function per kind of data ------------------------------------------------------------------------------------


def _own(config: Config, ranks: Ranks) -> Source:
    from launch_train.data.user_dataset import open_own

    asked = {"seed": config.seed, "batch_size": config.batch_size, "steps": config.steps}
    return open_own(config.data.path, config.data.settings, **asked, ranks=ranks)


def _synthetic(config: Config, ranks: Ranks) -> Source:
    model, rest = config.model, (config.seed, config.batch_size, ranks.device)
    if isinstance(model, ResNet):
        return SyntheticImages(model.num_classes, model.image_size, *rest)
    if isinstance(model, Gpt):
        return SyntheticTokens(model.vocab_size, model.block_size, *rest)
    if isinstance(model, Bert):
        return _hidden(config, SyntheticTokens(model.vocab_size - 1, model.block_size, *rest), ranks)
    if config.data.block_size is None and (config.data.image_size or model.task == "image-classification"):
        classes = _number(model, LABELS, "num_labels", "num_classes")
        return SyntheticImages(classes, _image_size(config), *rest)
    masked = _hides(config)
    tokens = _number(model, TOKENS, "vocab_size") - masked
    source = SyntheticTokens(tokens, _block_size(config), *rest)
    return _hidden(config, source, ranks) if masked else source


def _text(config: Config, corpus: Corpus, ranks: Ranks) -> Source:
    text = Text(corpus, _block_size(config), config.seed, config.batch_size, ranks.device)
    source = _hidden(config, text, ranks) if _hides(config) else text
    size = getattr(config.model, "vocab_size", None)
    if size is not None and source.vocab_size is not None and size < source.vocab_size:
        mask = ", the mask included" if source is not text else ""
        has = f"{corpus.tokenizer} has {source.vocab_size} tokens{mask}"
        raise UsageError(f"data: {has}; the model's vocab_size, {size}, must be no less")
    return source


def _images(config: Config, train: Any, held_out: Any) -> Source:
    from launch_train.data.images import open_images

    model = config.model
    asked = {"seed": config.seed, "batch_size": config.batch_size, "steps": config.steps}
    images = open_images(train, held_out, size=_image_size(config), **asked, facts={"data": config.data.path})
    has, classes = images.num_classes or 0, model.num_classes if isinstance(model, ResNet) else None
    if classes is not None and (has > classes or (train.labels and has != classes)):
        raise UsageError(
            f"data: {config.data.path} has {has} class{'es' if has > 1 else ''}, and the model {classes}"
            + (f": model: {{num_classes: {has}}}" if has > 1 else "")
        )
    return images


def _prepared(config: Config) -> tuple[Any, Any]:
    """Return (corpus, None) for text, or the listings of training and held-out images (None: part of the former)."""
    name, cache = config.data.path, cache_folder()
    path = _local(name, cache)
    if _sees(config, path):
        from launch_train.data.image_index import listed

        return listed(Path(path).expanduser(), cache, name)
    if config.data.tokenizer == "bytes":
        return prepare(path, cache, name), None
    from launch_train.data import tokenize as tokens
    from launch_train.data.tokenizers import open_tokenizer

    named = config.data.tokenizer
    tokenizer = open_tokenizer(named if named.startswith("tiktoken:") else _local(named, cache))
    return tokens.prepare(path, tokenizer, cache, name), None


def _local(path: str, cache: Path) -> str:
    if not path.startswith("gs://"):
        return path
    from launch_train.data.gcs_cache import fetch

    return str(fetch(path, cache))


def _sees(config: Config, path: str) -> bool:
    """Return whether the data is images: by the model's task, or, for custom models, by the files at `path`."""
    model = config.model
    if not isinstance(model, Foreign) or model.task != "auto":
        return isinstance(model, ResNet) or (isinstance(model, Foreign) and model.task == "image-classification")
    from launch_train.data.image_index import holds_images

    return holds_images(Path(path).expanduser())


# --- Settings from the model and the spec -----------------------------------------------------------------------------


def _hides(config: Config) -> bool:
    """Return whether the model predicts hidden tokens rather than the next token."""
    return isinstance(config.model, Bert) or (isinstance(config.model, Foreign) and config.model.task == "masked-lm")


def _hidden(config: Config, rows: Rows, ranks: Ranks) -> Source:
    share = config.model.masked if isinstance(config.model, Bert) else MASKED
    return Masked(rows, share, config.seed, config.batch_size, ranks.device)


def _image_size(config: Config) -> int:
    if isinstance(config.model, ResNet):
        return config.model.image_size
    own = _number(config.model, IMAGE_SIZE, "image_size") if isinstance(config.model, Foreign) else IMAGE_SIZE
    return config.data.image_size or own


def _block_size(config: Config) -> int:
    size = getattr(config.model, "block_size", None) or config.data.block_size
    if size is None:
        raise UsageError("data: block_size, how many tokens a sample has, must be given: data: {block_size: 1024}")
    return int(size)


def _number(model: Foreign, default: int, *names: str) -> int:
    found = (model.settings.get(name) for name in names)
    return next((one for one in found if isinstance(one, int)), default)

"""Training data. The samples of a step depend only on seed and step, not on the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch_train.common.config import Bert, Config, ExternalModel, Gpt, ResNet, Shape
from launch_train.common.errors import UsageError
from launch_train.data import tables
from launch_train.data.files import split_by_name
from launch_train.data.masked_lm import Masked, Rows
from launch_train.data.source import Batch, Source
from launch_train.data.synthetic import SyntheticImages, SyntheticTokens
from launch_train.data.text import Text, are_records, files_of, prepare_files
from launch_train.data.token_file import PRETOKENISED, Corpus, cache_folder, concatenate, join
from launch_train.distributed.process_group import Ranks, gather, run_once_per_node

if TYPE_CHECKING:
    from launch_train.common.storage.objects import Object
    from launch_train.data.tokenize import TextFiles
    from launch_train.data.tokenizers import Decode, Tokenizer

__all__ = ["Batch", "Source", "open_data", "open_decoder"]

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
        from launch_train.data.user_dataset import open_own

        settings = {"seed": config.seed, "batch_size": config.batch_size, "steps": config.steps}
        return open_own(path, config.data.settings, **settings, ranks=ranks)
    if path == "synthetic":
        return _synthetic(config, ranks)
    found = run_once_per_node(ranks, lambda: _prepared(config, ranks))
    if len(set(gather(ranks, tuple(part.sha256 for part in found if part is not None)))) > 1:
        raise UsageError(f"data: the nodes read different data at {path}; all need the same")
    if isinstance(found[0], Corpus):
        return _text(config, found[0], ranks)
    return _images(config, *found)


def open_decoder(config: Config, source: Source) -> Decode | None:
    """Return the function that makes text of the source's tokens; None: only their numbers are known.

    Raises UsageError or UnfitError if the tokenizer can't be loaded again.
    """
    if source.facts.get("data_unit") == "byte":
        from launch_train.data.tokenizers import decode_bytes

        return decode_bytes
    if source.facts.get("tokenizer") in (None, PRETOKENISED):
        return None
    return _tokenizer(config, cache_folder()).decode


# --- One function per kind of data ------------------------------------------------------------------------------------


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
    model = config.model
    size = model.settings.get("vocab_size") if isinstance(model, ExternalModel) else getattr(model, "vocab_size", None)
    if isinstance(size, int) and size < corpus.vocab_size and corpus.tokenizer == PRETOKENISED:
        from launch_train.data.token_shards import require_vocabulary

        require_vocabulary(corpus, size)
    size = getattr(config.model, "vocab_size", None)
    if size is not None and source.vocab_size is not None and size < source.vocab_size:
        mask = ", the mask included" if source is not text else ""
        has = f"{corpus.tokenizer} has {source.vocab_size} tokens{mask}"
        raise UsageError(f"data: {has}; the model's vocab_size, {size}, must be at least that")
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


def _prepared(config: Config, ranks: Ranks) -> tuple[Any, Any]:
    """Return (corpus, None) for text, or the listings of training and held-out images (None: part of the former)."""
    name, val, cache = config.data.path, config.data.val, cache_folder()
    records = _records_in_bucket(config, name)
    if not records and _sees(config, path := _local(name, cache)):
        from launch_train.data.image_index import listed, require_same_classes

        train, held_out = listed(Path(path).expanduser(), cache, name)
        if val is not None:
            held_out, _ = listed(Path(_local(val, cache)).expanduser(), cache, val)
            require_same_classes(train, held_out)
        return train, held_out
    corpus = _corpus(config, name, records, cache, ranks)
    if val is None:
        return corpus, None
    return join(corpus, _corpus(config, val, _records_in_bucket(config, val), cache, ranks)), None


def _records_in_bucket(config: Config, url: str) -> list[Object]:
    """Return the objects at a gs:// URL if they are records of text to tokenize, by their names, else an empty list.

    Such files needn't be kept on this machine, and not even downloaded if their tokens are in the bucket.
    """
    if not url.startswith("gs://") or config.data.tokenizer == "bytes" or _takes_images(config.model):
        return []
    from launch_train.data.gcs_cache import list_objects

    objects = list_objects(url)
    if in_tables := [one for one in objects if tables.are_in(Path(one.name))]:
        return in_tables
    return objects if all(are_records(Path(one.name)) for one in objects) else []


def _corpus(config: Config, name: str, records: list[Object], cache: Path, ranks: Ranks) -> Corpus:
    if records:
        return _records(config, name, records, cache, ranks)
    path = _local(name, cache)
    if _holds_tokens(config, path):
        from launch_train.data import token_shards

        by_name = config.data.val is None
        return token_shards.prepare(path, cache, name, config.data.dtype, column=_column(config), by_name=by_name)
    if config.data.dtype is not None:
        raise UsageError(f"data: dtype is for files of tokens (.bin), and {name} is text: remove data.dtype")
    files = files_of(path)
    train, held_out = split_by_name(files, path) if config.data.val is None and tables.are_in(files[0]) else (files, [])
    if config.data.tokenizer == "bytes":
        is_file = Path(path).expanduser().is_file()
        parts = [
            prepare_files(part, cache, name, _column(config), in_place=is_file) for part in (train, held_out) if part
        ]
    else:
        from launch_train.data.tokenize import LocalFiles

        groups = [[LocalFiles(part)] for part in (train, held_out) if part]
        parts = _tokenized(config, name, groups, cache, ranks)
    return join(*parts) if held_out else parts[0]


def _records(config: Config, url: str, records: list[Object], cache: Path, ranks: Ranks) -> Corpus:
    from launch_train.data.tokenize import BucketFiles, by_size

    named = {Path("/", one.name): one for one in records}
    root = str(Path("/", url.removeprefix("gs://").partition("/")[2]))
    is_split = config.data.val is None and tables.are_in(Path(records[0].name))
    train, held_out = split_by_name(list(named), root) if is_split else (list(named), [])
    groups = [by_size([named[path] for path in part]) for part in (train, held_out) if part]
    files = [[BucketFiles(url, one, cache) for one in group] for group in groups]
    parts = _tokenized(config, url, files, cache, ranks)
    return join(*parts) if held_out else parts[0]


def _tokenized(
    config: Config, name: str, groups: Sequence[Sequence[TextFiles]], cache: Path, ranks: Ranks
) -> list[Corpus]:
    """Tokenize text, and return a corpus per group. The tokens of a bucket's files are kept in that bucket.

    Each node begins at another file of a group, so that it finds what other nodes have tokenized meanwhile.
    """
    from launch_train.data.token_store import TokenStore
    from launch_train.data.tokenize import prepare_files

    tokenizer = _tokenizer(config, cache)
    store = TokenStore(name.removeprefix("gs://").partition("/")[0]) if name.startswith("gs://") else None
    corpora = list[Corpus]()
    for group in groups:
        first = len(group) * ranks.node_rank // ranks.world
        order = [*range(first, len(group)), *range(first)]
        done = {at: prepare_files(group[at], tokenizer, cache, name, _column(config), store) for at in order}
        corpora.append(concatenate([done[at] for at in range(len(group))]))
    return corpora


def _tokenizer(config: Config, cache: Path) -> Tokenizer:
    from launch_train.data.tokenizers import open_tokenizer

    named = config.data.tokenizer
    return open_tokenizer(named if named.startswith("tiktoken:") else _local(named, cache))


def _local(path: str, cache: Path) -> str:
    if path.startswith("hf:"):
        from launch_train.data import hub_dataset

        return hub_dataset.fetch(path, cache)
    if not path.startswith("gs://"):
        return path
    from launch_train.data.gcs_cache import fetch

    return str(fetch(path, cache))


def _takes_images(model: Shape) -> bool:
    return isinstance(model, ResNet) or (isinstance(model, ExternalModel) and model.task == "image-classification")


def _sees(config: Config, path: str) -> bool:
    """Return whether the data is images: by the model's task, or, for custom models, by the files at `path`."""
    model = config.model
    if not isinstance(model, ExternalModel) or model.task != "auto":
        return _takes_images(model)
    from launch_train.data.image_index import holds_images

    return holds_images(Path(path).expanduser())


def _holds_tokens(config: Config, path: str) -> bool:
    """Return whether the data is tokens rather than text. With a tokenizer, text beside shards of tokens is read."""
    from launch_train.data import token_shards

    holds = token_shards.holding(path, _column(config))
    if holds == "only" and config.data.tokenizer != "bytes":
        raise UsageError(f"data: {path} holds tokens, not text: remove data.tokenizer")
    return holds == "only" or (holds == "some" and config.data.tokenizer == "bytes")


# --- Settings from the model and the spec -----------------------------------------------------------------------------


def _hides(config: Config) -> bool:
    """Return whether the model predicts hidden tokens rather than the next token."""
    return isinstance(config.model, Bert) or (
        isinstance(config.model, ExternalModel) and config.model.task == "masked-lm"
    )


def _hidden(config: Config, rows: Rows, ranks: Ranks) -> Source:
    share = config.model.masked if isinstance(config.model, Bert) else MASKED
    return Masked(rows, share, config.seed, config.batch_size, ranks.device)


def _column(config: Config) -> str:
    return config.data.column or "text"


def _image_size(config: Config) -> int:
    if isinstance(config.model, ResNet):
        return config.model.image_size
    own = _number(config.model, IMAGE_SIZE, "image_size") if isinstance(config.model, ExternalModel) else IMAGE_SIZE
    return config.data.image_size or own


def _block_size(config: Config) -> int:
    size = getattr(config.model, "block_size", None) or config.data.block_size
    if size is None:
        raise UsageError("data: block_size (tokens per sample) is required: data: {block_size: 1024}")
    return int(size)


def _number(model: ExternalModel, default: int, *names: str) -> int:
    found = (model.settings.get(name) for name in names)
    return next((one for one in found if isinstance(one, int)), default)

"""Training data. The samples of a step depend only on seed and step, not on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from launch_train.common.config import Bert, Config, ExternalModel, Gpt, ResNet, is_code
from launch_train.common.errors import UsageError
from launch_train.data.files import split_by_name
from launch_train.data.masked_lm import Masked
from launch_train.data.records import are_records, is_table
from launch_train.data.source import Batch, Source, TokenRows
from launch_train.data.synthetic import SyntheticImages, SyntheticTokens
from launch_train.data.text import Text, corpus_of_bytes, files_of
from launch_train.data.token_file import PRETOKENISED, Corpus, cache_folder, concatenate, join
from launch_train.distributed.process_group import Ranks, gather, run_once_per_node

if TYPE_CHECKING:
    from launch_train.common.storage.bucket import Object
    from launch_train.data.image_index import Listing
    from launch_train.data.tokenize import TextFiles
    from launch_train.data.tokenizers import Decode, Tokenizer

__all__ = ["Batch", "Source", "open_data", "open_decoder"]

IMAGE_SIZE, MASKED, TOKENS, LABELS = 224, 0.15, 256, 2
"""Defaults if neither the model nor the spec sets them: image height and width, the hidden share, and the numbers of
tokens and classes of synthetic data (2 classes is transformers' default)."""


def open_data(config: Config, ranks: Ranks) -> Source:
    """Open the source for `config.data`. The first process of each node prepares it while the others wait.

    Raises on all ranks: UsageError if the data does not exist, is too small, doesn't fit the model, or differs between
    nodes; UnfitError if this machine can't download or store it.
    """
    path = config.data.path
    if is_code(path):
        from launch_train.data.user_dataset import open_own

        settings = {"seed": config.seed, "batch_size": config.batch_size, "steps": config.steps}
        return open_own(path, config.data.settings, **settings, ranks=ranks)
    if path == "synthetic":
        return _open_synthetic(config, ranks)
    prepared = run_once_per_node(ranks, lambda: _prepare(config, ranks))
    parts = (prepared,) if isinstance(prepared, Corpus) else prepared
    if len(set(gather(ranks, tuple(part.sha256 for part in parts if part is not None)))) > 1:
        raise UsageError(f"data: the nodes read different data at {path}; all need the same")
    return _open_text(config, prepared, ranks) if isinstance(prepared, Corpus) else _open_images(config, *prepared)


def open_decoder(config: Config, source: Source) -> Decode | None:
    """Return the function that makes text of the source's tokens; None: only their numbers are known.

    Raises UsageError or UnfitError if the tokenizer can't be loaded again.
    """
    if source.facts.get("data_unit") == "byte":
        return lambda tokens: bytes(tokens).decode("utf-8", "replace")  # ValueError: one is no byte
    if source.facts.get("tokenizer") in (None, PRETOKENISED):
        return None
    return _tokenizer(config, cache_folder()).decode


# --- What a path holds, and its preparation ---------------------------------------------------------------------------


class DataFiles(NamedTuple):
    """The files at a data path: `path` on this machine, or, for records of text that stay in a bucket, `objects`."""

    kind: Literal["images", "tokens", "bytes", "text", "text in a bucket"]
    name: str
    path: str = ""
    objects: Sequence[Object] = ()


def detect(config: Config, name: str, cache: Path) -> DataFiles:
    """Download the data at `name` and return its kind: by the model's task, the tokenizer, and the files themselves.

    Only records of text to tokenize are not downloaded from a bucket yet: their tokens may be there.
    """
    model, tokenizes = config.model, config.data.tokenizer != "bytes"
    are_images = isinstance(model, ResNet) or (
        isinstance(model, ExternalModel) and model.task == "image-classification"
    )
    if name.startswith("gs://") and tokenizes and not are_images:
        from launch_train.data.gcs_cache import list_objects

        objects = list_objects(name)
        in_tables = [item for item in objects if is_table(Path(item.name))]
        if in_tables or all(are_records(Path(item.name)) for item in objects):
            return DataFiles("text in a bucket", name, objects=in_tables or objects)
    path = _local(name, cache)
    if isinstance(model, ExternalModel) and model.task == "auto":
        from launch_train.data.image_index import holds_images

        are_images = holds_images(Path(path).expanduser())
    if are_images:
        return DataFiles("images", name, path)
    from launch_train.data import token_shards

    shards = token_shards.holding(path, config.data.column or "text")
    if shards == "only" and tokenizes:
        raise UsageError(f"data: {path} holds tokens, not text: remove data.tokenizer")
    if shards == "only" or (shards == "some" and not tokenizes):  # with a tokenizer, the text beside them is read
        return DataFiles("tokens", name, path)
    return DataFiles("text" if tokenizes else "bytes", name, path)


def _prepare(config: Config, ranks: Ranks) -> Corpus | tuple[Listing, Listing | None]:
    """Return a corpus, or the listings of training and held-out images (None: they are part of the former)."""
    val, cache = config.data.val, cache_folder()
    data = detect(config, config.data.path, cache)
    if data.kind != "images":
        corpus = _corpus(config, data, cache, ranks)
        return corpus if val is None else join(corpus, _corpus(config, detect(config, val, cache), cache, ranks))
    from launch_train.data.image_index import listed, require_same_classes

    train, held_out = listed(Path(data.path).expanduser(), cache, data.name)
    if val is not None:
        held_out, _ = listed(Path(_local(val, cache)).expanduser(), cache, val)
        require_same_classes(train, held_out)
    return train, held_out


def _corpus(config: Config, data: DataFiles, cache: Path, ranks: Ranks) -> Corpus:
    """Return the tokens of `data`. Without `data.val`, tables that are named so are held out."""
    by_name, column = config.data.val is None, config.data.column or "text"

    def parts(files: Sequence[Path], root: str) -> list[list[Path]]:
        split = split_by_name(files, root) if by_name and is_table(files[0]) else (list(files), [])
        return [part for part in split if part]

    if data.kind == "tokens":
        from launch_train.data import token_shards

        return token_shards.corpus_of_shards(
            data.path, cache, data.name, config.data.dtype, column=column, by_name=by_name
        )
    if data.kind != "text in a bucket":
        if config.data.dtype is not None:
            raise UsageError(f"data: dtype is for files of tokens (.bin), and {data.name} is text: remove data.dtype")
        files = parts(files_of(data.path), data.path)
    if data.kind == "bytes":
        in_place = Path(data.path).expanduser().is_file()
        corpora = [corpus_of_bytes(part, cache, data.name, column, in_place=in_place) for part in files]
    else:
        from launch_train.data.tokenize import bucket_files, by_size, local_files

        if data.kind == "text":
            texts = [[local_files(part)] for part in files]
        else:
            objects = {Path("/", item.name): item for item in data.objects}
            root = str(Path("/", data.name.removeprefix("gs://").partition("/")[2]))
            groups = [by_size([objects[path] for path in part]) for part in parts(list(objects), root)]
            texts = [[bucket_files(data.name, group, cache) for group in part] for part in groups]
        corpora = _tokenize(config, data.name, texts, cache, ranks)
    return join(*corpora) if len(corpora) > 1 else corpora[0]


def _tokenize(
    config: Config, name: str, parts: Sequence[Sequence[TextFiles]], cache: Path, ranks: Ranks
) -> list[Corpus]:
    """Tokenize text, and return a corpus per part. The tokens of a bucket's files are kept in that bucket.

    Each node begins at another group of files of a part, so that it finds what other nodes have tokenized meanwhile.
    """
    from launch_train.data.token_store import TokenStore
    from launch_train.data.tokenize import corpus_of_tokens

    tokenizer, column = _tokenizer(config, cache), config.data.column or "text"
    store = TokenStore(name.removeprefix("gs://").partition("/")[0]) if name.startswith("gs://") else None
    corpora = list[Corpus]()
    for groups in parts:
        first = len(groups) * ranks.node_rank // ranks.world
        order = [*range(first, len(groups)), *range(first)]
        tokens = {at: corpus_of_tokens(groups[at], tokenizer, cache, name, column, store) for at in order}
        corpora.append(concatenate([tokens[at] for at in range(len(groups))]))
    return corpora


def _tokenizer(config: Config, cache: Path) -> Tokenizer:
    from launch_train.data.tokenizers import open_tokenizer

    named = config.data.tokenizer
    return open_tokenizer(named if named.startswith("tiktoken:") else _local(named, cache))


def _local(path: str, cache: Path) -> str:
    """Return the path of a data path on this machine; download it if necessary."""
    if path.startswith("hf:"):
        from launch_train.data import hub_dataset

        return hub_dataset.fetch(path, cache)
    if not path.startswith("gs://"):
        return path
    from launch_train.data.gcs_cache import fetch

    return str(fetch(path, cache))


# --- One function per kind of source ----------------------------------------------------------------------------------


def _open_synthetic(config: Config, ranks: Ranks) -> Source:
    model, order = config.model, (config.seed, config.batch_size, ranks.device)
    if isinstance(model, ResNet):
        return SyntheticImages(model.num_classes, model.image_size, *order)
    if isinstance(model, Gpt):
        return SyntheticTokens(model.vocab_size, model.block_size, *order)
    if isinstance(model, Bert):
        return _hide(config, SyntheticTokens(model.vocab_size - 1, model.block_size, *order), ranks)
    if config.data.block_size is None and (config.data.image_size or model.task == "image-classification"):
        classes = _number(model, LABELS, "num_labels", "num_classes")
        return SyntheticImages(classes, _image_size(config), *order)
    masked = model.task == "masked-lm"
    source = SyntheticTokens(_number(model, TOKENS, "vocab_size") - masked, _block_size(config), *order)
    return _hide(config, source, ranks) if masked else source


def _open_text(config: Config, corpus: Corpus, ranks: Ranks) -> Source:
    model = config.model
    text = Text(corpus, _block_size(config), config.seed, config.batch_size, ranks.device)
    hides = isinstance(model, Bert) or (isinstance(model, ExternalModel) and model.task == "masked-lm")
    source = _hide(config, text, ranks) if hides else text
    size = model.settings.get("vocab_size") if isinstance(model, ExternalModel) else getattr(model, "vocab_size", None)
    if isinstance(size, int) and size < corpus.vocab_size and corpus.tokenizer == PRETOKENISED:
        from launch_train.data.token_shards import require_vocabulary

        require_vocabulary(corpus, size)
    size = getattr(model, "vocab_size", None)
    if size is not None and source.vocab_size is not None and size < source.vocab_size:
        mask = ", the mask included" if hides else ""
        has = f"{corpus.tokenizer} has {source.vocab_size} tokens{mask}"
        raise UsageError(f"data: {has}; the model's vocab_size, {size}, must be at least that")
    return source


def _hide(config: Config, rows: TokenRows, ranks: Ranks) -> Source:
    """Return rows of tokens for a model that predicts hidden tokens rather than the next token."""
    share = config.model.masked if isinstance(config.model, Bert) else MASKED
    return Masked(rows, share, config.seed, config.batch_size, ranks.device)


def _open_images(config: Config, train: Listing, held_out: Listing | None) -> Source:
    from launch_train.data.images import open_images

    model = config.model
    order = {"seed": config.seed, "batch_size": config.batch_size, "steps": config.steps}
    images = open_images(train, held_out, size=_image_size(config), **order, facts={"data": config.data.path})
    has, classes = images.num_classes or 0, model.num_classes if isinstance(model, ResNet) else None
    if classes is not None and (has > classes or (train.labels and has != classes)):
        raise UsageError(
            f"data: {config.data.path} has {has} class{'es' if has > 1 else ''}, and the model {classes}"
            + (f": model: {{num_classes: {has}}}" if has > 1 else "")
        )
    return images


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
    """Return the first of the model's settings with these names that is a whole number."""
    settings = (model.settings.get(name) for name in names)
    return next((value for value in settings if isinstance(value, int)), default)

"""Load tokenizers: a tokenizer.json of Hugging Face's tokenizers, or a tiktoken encoding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from launch_train.common.cgroup import cores
from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.text import one_line
from launch_train.data.files import import_optional

NETWORK_SECONDS = 60.0
"""Timeout for the download of tiktoken's vocabulary (1 to 2 MB)."""

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MASKS = ("[MASK]", "<mask>")
"""Common names of the end-of-document token and the mask token, for tokenizers without a tokenizer_config.json in the
same folder."""

NEEDED = "this tokenizer needs the package {} (extra {}): {{}}"

Decode = Callable[[list[int]], str]
"""Returns the text of tokens. What is no valid UTF-8 becomes U+FFFD."""


class Tokenizer(NamedTuple):
    """A tokenizer. `encode` tokenizes a list of texts on all cores. `end` is appended to each document."""

    name: str
    digest: str
    vocab_size: int
    end: int | None
    mask: int | None
    encode: Callable[[list[str]], list[list[int]]]
    decode: Decode
    origin: str = ""
    """The name that `open_tokenizer` was called with, so that other processes can open it too. Empty: they can't."""

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"


def open_tokenizer(name: str) -> Tokenizer:
    """Load `tiktoken:ENCODING`, or a tokenizer.json by its path.

    Raises UsageError if it is invalid or its package is missing, UnfitError if a needed download fails.
    """
    if name.startswith("tiktoken:"):
        return _tiktoken(name)
    path = Path(name).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        wrong = f"tokenizer {name} can't be read: {error.strerror or error}"
        raise UsageError(f"data: {wrong} (bytes, a tokenizer.json, or tiktoken:ENCODING)") from error
    tokenizers = import_optional("tokenizers", NEEDED.format("tokenizers", "train"))
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises plain Exception
        raise UsageError(f"data: {name} is not a tokenizer.json: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _config(path.parent / "tokenizer_config.json")
    return Tokenizer(
        name=path.name,
        digest=hashlib.sha256(content).hexdigest(),
        # Not the vocabulary's size: it may have gaps.
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        end=_first(tokenizer.token_to_id, (config.get("eos_token"), config.get("sep_token"), *_ENDS)),
        mask=_first(tokenizer.token_to_id, (config.get("mask_token"), *_MASKS)),
        encode=lambda texts: [text.ids for text in tokenizer.encode_batch_fast(texts, add_special_tokens=False)],
        decode=tokenizer.decode,
        origin=str(path.resolve()),
    )


def _config(path: Path) -> Mapping[str, Any]:
    """Return the fields of a tokenizer_config.json. Special tokens are strings, or objects with a `content`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    return {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}


def _first(number: Callable[[str], int | None], names: Iterable[Any]) -> int | None:
    """Return the number of the first of the tokens that exists."""
    numbers = (number(name) for name in names if isinstance(name, str))
    return next((token for token in numbers if token is not None), None)


def _tiktoken(name: str) -> Tokenizer:
    tiktoken = import_optional("tiktoken", NEEDED.format("tiktoken", "tiktoken"))
    encoding = name.removeprefix("tiktoken:")
    if encoding not in tiktoken.list_encoding_names():
        raise UsageError(f"data: tiktoken has no {encoding}, only {', '.join(tiktoken.list_encoding_names())}")
    pool = ThreadPoolExecutor(1)
    try:
        table = pool.submit(tiktoken.get_encoding, encoding).result(NETWORK_SECONDS)  # its download has no timeout
    except Exception as error:  # errors of requests or a proxy, a digest mismatch, a timeout
        why = f"no answer within {NETWORK_SECONDS:g} s" if isinstance(error, TimeoutError) else one_line(error, 160)
        raise UnfitError(
            f"data: tiktoken's table of {encoding} is unavailable ({why}): check the network, or set "
            "TIKTOKEN_CACHE_DIR to a folder that has it"
        ) from error
    finally:
        pool.shutdown(wait=False)
    return Tokenizer(
        name=name,
        digest=hashlib.sha256(name.encode()).hexdigest(),
        vocab_size=table.n_vocab,
        end=table._special_tokens.get("<|endoftext|>"),
        mask=None,
        encode=lambda texts: table.encode_ordinary_batch(texts, num_threads=cores()),  # tiktoken's own default is 8
        decode=partial(_decode_tiktoken, table),
        origin=name,
    )


def _decode_tiktoken(encoding: Any, tokens: list[int]) -> str:
    """Decode tokens; some vocabularies have gaps, which tiktoken's own `decode` refuses."""
    pieces = list[bytes]()
    for token in tokens:
        try:
            pieces.append(encoding.decode_single_token_bytes(token))
        except KeyError:
            pieces.append(b"\xff")
    return b"".join(pieces).decode("utf-8", "replace")

"""Corpora of the files at a path, as `open_data` prepares them."""

from __future__ import annotations

from pathlib import Path

from launch_train.data import tokenize
from launch_train.data.text import corpus_of_bytes, files_of
from launch_train.data.token_file import Corpus
from launch_train.data.tokenizers import Tokenizer


def byte_corpus(data: str, cache: Path, name: str = "") -> Corpus:
    return corpus_of_bytes(files_of(data), cache, name or data, in_place=Path(data).expanduser().is_file())


def token_corpus(data: str, tokenizer: Tokenizer, cache: Path) -> Corpus:
    return tokenize.corpus_of_tokens(tokenize.local_files(files_of(data)), tokenizer, cache, data)

"""Tokenizers beside exported weights: that of bytes, or a file that the exporting person names.

The file that a checkpoint names is never read: whoever can write to the run folder could name any file of the person's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch_train.common.errors import UsageError
from launch_train.common.storage import OutputError, open_storage

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
LOADED_BY = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode()


def of_run(about: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the tokenizer of bytes, if the run used it."""
    if "script" in about or not _reads_text(about["config"]) or about["config"]["data"]["tokenizer"] != "bytes":
        return {}
    # Byte-level BPE without merges: token ids are the bytes of the text. Each byte is a printable character, as in
    # openai/gpt-2, encoder.py.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return {FILE: json.dumps(content, ensure_ascii=False).encode(), SETTINGS: LOADED_BY}


def missing(about: Mapping[str, Any], tokenizer: str | None) -> Iterator[str]:
    """Yield a line about the run's tokenizer, if it is neither `tokenizer` nor that of bytes."""
    if tokenizer or "script" in about or not _reads_text(about["config"]):
        return
    name = about["config"]["data"]["tokenizer"]
    if name.startswith("tiktoken:"):
        yield f"no tokenizer exported: it is tiktoken.get_encoding({name.removeprefix('tiktoken:')!r})"
    elif name != "bytes":
        yield f"no tokenizer exported; to add the run's, which was {name}: --tokenizer FILE"


def read(name: str) -> dict[str, bytes]:
    """Return the files of a tokenizer.json, here or gs://…. Raises UsageError: it can't be read."""
    try:
        if not name.startswith("gs://"):
            return {FILE: Path(name).expanduser().read_bytes(), SETTINGS: LOADED_BY}
        folder, _, file = name.rpartition("/")
        return {FILE: open_storage(folder).read(file), SETTINGS: LOADED_BY}
    except (OSError, OutputError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"--tokenizer {name} can't be read: {reason}") from error


def _reads_text(config: Mapping[str, Any]) -> bool:
    """Return whether the run's samples were text that the trainer tokenised."""
    model, path = config["model"], config["data"]["path"]
    is_image = model["name"] == "resnet50" or model.get("task") == "image-classification"
    return not is_image and path != "synthetic" and not (":" in path and not path.startswith("gs://"))

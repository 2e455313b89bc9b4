"""Write a run's tokenizer beside its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def write(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the tokenizer of `run.config` to `folder`, as tokenizer.json. Returns what is missing, in words."""
    if not _reads_text(config):
        return []
    name = config["data"]["tokenizer"]
    if name == "bytes":
        (folder / FILE).write_text(json.dumps(_of_bytes(), ensure_ascii=False), encoding="utf-8")
        (folder / SETTINGS).write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        return []
    if name.startswith("tiktoken:"):
        return [f"no tokenizer exported: it is tiktoken.get_encoding({name.removeprefix('tiktoken:')!r})"]
    try:
        content = _read(name)
    except OSError as error:
        return [f"no tokenizer exported: {name} can't be read here ({error.strerror or error})"]
    (folder / FILE).write_bytes(content)
    (folder / SETTINGS).write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return []


def _reads_text(config: Mapping[str, Any]) -> bool:
    """Return whether the run's samples were text that the trainer tokenised."""
    model, path = config["model"], config["data"]["path"]
    is_image = model["name"] == "resnet50" or model.get("task") == "image-classification"
    return not is_image and path != "synthetic" and not (":" in path and not path.startswith("gs://"))


def _read(name: str) -> bytes:
    """Return the content of a local file or of an object in a bucket. Raises OSError."""
    if not name.startswith("gs://"):
        return Path(name).expanduser().read_bytes()
    from launch_train.common.storage import OutputError, open_storage

    folder, _, file = name.rpartition("/")
    try:
        return open_storage(folder).read(file)
    except OutputError as error:
        raise OSError(str(error)) from error


def _of_bytes() -> dict[str, Any]:
    """Return a tokenizer.json whose token ids are the bytes of the text: byte-level BPE without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(_byte_chars())}, "merges": []}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _byte_chars() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE (openai/gpt-2, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

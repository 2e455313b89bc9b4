"""Tokens in a bucket, written once and found by every later machine.

A corpus KEY is two objects: KEY.tokens, and KEY.json with its statistics, which is written last. Both are only ever
created, never replaced: of two machines that write the same tokens, one does.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from launch_train.common.errors import OutputError
from launch_train.common.storage.bucket import Objects
from launch_train.common.text import si
from launch_train.data.token_file import BLOCK, TokenStatistics, temporary

FOLDER = ".launch/tokens"
UPLOAD_SECONDS = 3600.0


class TokenStore:
    """The tokens in gs://BUCKET/.launch/tokens. Problems are printed, once: the machine then works by itself."""

    def __init__(self, bucket: str) -> None:
        self.url = f"gs://{bucket}/{FOLDER}"
        self._folder = Objects(self.url).within(UPLOAD_SECONDS)
        self._works = True

    def get(self, key: str, tokens: Path) -> tuple[TokenStatistics, int] | None:
        """Download a corpus to `tokens`, and return its statistics and the size of its text; None if there is none.

        The content is compared with its CRC32C in the bucket and its SHA-256 in KEY.json.
        """
        try:
            objects = {item.name: item for item in self._folder.objects(f"{key}.")}
            if f"{key}.json" not in objects or f"{key}.tokens" not in objects:
                return None
            known = json.loads(self._folder.read(f"{key}.json"))
            measured, size = TokenStatistics(**known["tokens"]), int(known["bytes"])
            with temporary(tokens.parent) as (file, path):
                try:
                    self._folder.fetch(objects[f"{key}.tokens"], file)
                except FileNotFoundError:  # deleted meanwhile
                    return None
                digest = hashlib.sha256()
                with path.open("rb") as content:
                    while block := content.read(BLOCK):
                        digest.update(block)
                if digest.hexdigest() != measured.sha256:
                    print(f"data: {self.url}/{key}.tokens isn't what its .json describes; tokenizing again")
                    return None
                path.replace(tokens)
        except (OutputError, OSError, ValueError, KeyError, TypeError) as error:
            self._report("read", error)
            return None
        print(f"data: {si(measured.length)} tokens from {self.url}/{key}.tokens")
        return measured, size

    def put(self, key: str, tokens: Path, measured: TokenStatistics, size: int) -> None:
        """Upload a corpus, unless another machine has."""
        if not self._works:
            return
        about = json.dumps({"tokens": asdict(measured), "bytes": size}).encode()
        content = np.memmap(tokens, mode="r").data if measured.length else b""
        try:
            for name, data in ((f"{key}.tokens", content), (f"{key}.json", about)):
                with suppress(FileExistsError):
                    self._folder.write(name, data, create=True)
        except OutputError as error:
            self._report("written", error)

    def _report(self, what: str, error: Exception) -> None:
        if self._works:
            self._works = False
            print(f"data: tokens can't be {what} for other machines: {error}; continuing with this machine's own")

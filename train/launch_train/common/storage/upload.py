"""One upload to Cloud Storage, until what is there is surely what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch_train.common.storage import errors
from launch_train.common.storage.errors import TornError
from launch_train.common.storage.retry import Tries
from launch_train.common.storage.sources import Content

CHUNK = 32 << 20
"""Bytes in one request of a resumable upload, and so in memory at once."""

SESSIONS = 3
"""How often a resumable upload is begun that gets lost on its way."""


class LostError(Exception):
    """A resumable upload got lost too often."""


class Upload:
    """One request up to 8 MiB; above that a resumable upload, whose chunks are tried again one by one."""

    def __init__(self, blob: Callable[[], Any], content: Content, generation: int | None, tries: Tries) -> None:
        """`generation` is the one that the object must have (0: there must be none; None: whatever it is)."""
        self._blob, self._content, self._generation, self._tries = blob, content, generation, tries
        self._sum = ""
        self._begun = 0

    def attempt(self) -> str:
        """Send it all, and return its generation. Raises TornError where another attempt may do better."""
        from google.api_core.exceptions import PreconditionFailed

        try:
            return self._sent()
        except PreconditionFailed:
            # After a try that may have had its effect, the conflict may be with ourselves.
            if self._tries.unsure and (generation := self._generation_if_ours()):
                return generation
            raise
        except Exception as error:
            if errors.is_damage(error):
                raise TornError(errors.said(error)) from error
            if errors.is_off_track(error):
                raise self._begin_again(error) from error
            raise

    def _sent(self) -> str:
        """The service itself refuses what doesn't have the checksum that is sent before it: nothing torn gets there."""
        blob = self._blob()
        self._sum = self._content.crc32c()
        blob.crc32c, blob.chunk_size = self._sum, CHUNK
        blob.upload_from_file(
            self._content.stream(),
            size=self._content.size,
            content_type="application/octet-stream",
            if_generation_match=self._generation,
            checksum=None,
            timeout=self._tries.timeout(),
            retry=self._tries,
        )
        if not self._is_ours(blob):
            raise TornError("the answer to the upload is about other content")
        return str(blob.generation)

    def _begin_again(self, error: Exception) -> Exception:
        self._begun += 1
        return TornError(errors.said(error)) if self._begun < SESSIONS else LostError(f"begun {SESSIONS} times")

    def _generation_if_ours(self) -> str:
        """The object's generation if it has our content, else an empty text."""
        from google.api_core.exceptions import NotFound

        blob = self._blob()
        try:
            blob.reload(timeout=self._tries.timeout(), retry=self._tries)
        except NotFound:
            return ""
        return str(blob.generation) if self._is_ours(blob) else ""

    def _is_ours(self, blob: Any) -> bool:
        return bool(blob.generation) and (blob.crc32c, blob.size) == (self._sum, self._content.size)

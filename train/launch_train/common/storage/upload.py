"""Upload one object to Cloud Storage, until the stored object is certainly the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch_train.common.storage import errors
from launch_train.common.storage.errors import TornError
from launch_train.common.storage.retry import RetryBudget
from launch_train.common.storage.sources import Content

CHUNK = 32 << 20
"""Bytes of one request of a resumable upload, and so in memory at once."""

SESSIONS = 3
"""Starts of a resumable upload that gets lost."""


class LostError(Exception):
    """A resumable upload was lost too often."""


class Upload:
    """Uploads up to 8 MiB in one request, larger objects in a resumable upload with retries by chunk."""

    def __init__(self, blob: Callable[[], Any], content: Content, generation: int | None, budget: RetryBudget) -> None:
        """`generation` is the required one of the existing object (0: none exists; None: any)."""
        self._blob, self._content, self._generation, self._budget = blob, content, generation, budget
        self._sum = ""
        self._starts = 0

    def attempt(self) -> str:
        """Upload the content and return its generation. Raises TornError if a retry may work."""
        from google.api_core.exceptions import PreconditionFailed

        try:
            return self._upload()
        except PreconditionFailed:
            # An earlier attempt may have taken effect: then the conflict is with ourselves.
            if self._budget.unsure and (generation := self._generation_if_ours()):
                return generation
            raise
        except Exception as error:
            if errors.is_damage(error):
                raise TornError(errors.error_text(error)) from error
            if errors.is_upload_lost(error):
                raise self._restart_or_give_up(error) from error
            raise

    def _upload(self) -> str:
        """Upload once. The service rejects content that doesn't match the checksum, so nothing truncated is stored."""
        blob = self._blob()
        self._sum = self._content.crc32c()
        blob.crc32c, blob.chunk_size = self._sum, CHUNK
        blob.upload_from_file(
            self._content.stream(),
            size=self._content.size,
            content_type="application/octet-stream",
            if_generation_match=self._generation,
            checksum=None,
            timeout=self._budget.timeout(),
            retry=self._budget,
        )
        if not self._is_ours(blob):
            raise TornError("the response to the upload is about other content")
        return str(blob.generation)

    def _restart_or_give_up(self, error: Exception) -> Exception:
        self._starts += 1
        return (
            TornError(errors.error_text(error)) if self._starts < SESSIONS else LostError(f"started {SESSIONS} times")
        )

    def _generation_if_ours(self) -> str:
        """Return the object's generation if it has our content, else an empty string."""
        from google.api_core.exceptions import NotFound

        blob = self._blob()
        try:
            blob.reload(timeout=self._budget.timeout(), retry=self._budget)
        except NotFound:
            return ""
        return str(blob.generation) if self._is_ours(blob) else ""

    def _is_ours(self, blob: Any) -> bool:
        return bool(blob.generation) and (blob.crc32c, blob.size) == (self._sum, self._content.size)

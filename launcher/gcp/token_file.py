"""Credentials from a file that somebody else keeps fresh: gcloud's CLOUDSDK_AUTH_ACCESS_TOKEN_FILE."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

REQUEST_SECONDS: Final = 60.0
"""A request is over by then, one way or another."""


class TokenFile:
    """The file, and the token that it held when it was last read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, ValueError: there is no token in it now."""
        self.path = path
        self.token = read(path)
        self._changed = float("-inf")

    def look(self) -> bool:
        """Whether another token has come. A file that can't be read for a moment (it is being replaced) leaves the
        token that was there."""
        before = self.token
        try:
            self.token = read(self.path)
        except (OSError, ValueError):
            return False
        if self.token != before:
            self._changed = time.monotonic()
        return self.token != before

    @property
    def is_new(self) -> bool:
        """Whether the token may have come while a request with the one before was under way."""
        return time.monotonic() - self._changed < REQUEST_SECONDS


def file_credentials(path: Path) -> Any:
    """google-auth's credentials with the token that the file holds when a request is made, by REST and gRPC alike: a
    token lives for an hour and a job for days. Raises OSError, ValueError: there is none now."""
    from google.auth.credentials import Credentials
    from google.auth.exceptions import RefreshError

    file = TokenFile(path)

    class FileCredentials(Credentials):  # type: ignore[misc]  # google-auth has no types
        def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
            file.look()
            self.token = file.token
            super().before_request(request, method, url, headers)

        def refresh(self, request: Any) -> None:
            """Called after a 401: a token that has come since then may do better, even if another thread saw it."""
            if not file.look() and not file.is_new:
                raise RefreshError(f"the access token in {file.path} is refused, and no other has come")
            self.token = file.token

    found = FileCredentials()
    found.token = file.token
    return found


def read(path: Path) -> str:
    """The token. Raises OSError, ValueError: the file can't be read, or holds none."""
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError("it holds no token")
    return token

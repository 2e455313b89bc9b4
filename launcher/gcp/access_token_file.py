"""Credentials from a file that another program refreshes: gcloud's CLOUDSDK_AUTH_ACCESS_TOKEN_FILE."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

REQUEST_SECONDS: Final = 60.0
"""Upper bound on the duration of a request, in seconds."""


class TokenFile:
    """The file, and the token that it held when it was last read."""

    def __init__(self, path: Path) -> None:
        """Read the token. Raises OSError, ValueError: the file holds none."""
        self.path = path
        self.token = read(path)
        self._changed = float("-inf")

    def look(self) -> bool:
        """Read the file again and return whether the token has changed.

        If the file can't be read, for example while it is being replaced, the previous token stays.
        """
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
        """Return whether the token may have changed during a request that used the previous one."""
        return time.monotonic() - self._changed < REQUEST_SECONDS


def file_credentials(path: Path) -> Any:
    """Return google-auth credentials that read the token from the file for each request, over REST and gRPC.

    A token is valid for an hour, but a job may run for days. Raises OSError, ValueError: the file holds no token.
    """
    from google.auth.credentials import Credentials
    from google.auth.exceptions import RefreshError

    file = TokenFile(path)

    class FileCredentials(Credentials):  # type: ignore[misc]  # google-auth has no types
        def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
            file.look()
            self.token = file.token
            super().before_request(request, method, url, headers)

        def refresh(self, request: Any) -> None:
            """Use a newer token after a 401, even if another thread has already read it."""
            if not file.look() and not file.is_new:
                raise RefreshError(f"the access token in {file.path} was rejected, and the file has no newer one")
            self.token = file.token

    credentials = FileCredentials()
    credentials.token = file.token
    return credentials


def read(path: Path) -> str:
    """Return the token. Raises OSError, ValueError: the file can't be read, or holds none."""
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError("it holds no token")
    return token

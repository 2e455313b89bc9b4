"""Credentials from a file that another program refreshes: gcloud's CLOUDSDK_AUTH_ACCESS_TOKEN_FILE."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

REQUEST_SECONDS: Final = 60.0
"""Upper bound on the duration of a request, in seconds."""


def file_credentials(path: Path) -> Any:
    """Return google-auth credentials that read the token from the file for each request, over REST and gRPC.

    A token is valid for an hour, but a job may run for days. Raises OSError, ValueError: the file holds no token.
    """
    from google.auth.credentials import Credentials
    from google.auth.exceptions import RefreshError

    class FileCredentials(Credentials):  # type: ignore[misc]  # google-auth has no types
        token: str
        changed = float("-inf")

        def read_again(self) -> bool:
            """Return whether the token has changed. The old one stays while the file is being replaced."""
            before = self.token
            try:
                self.token = read_token(path)
            except (OSError, ValueError):
                return False
            if self.token != before:
                self.changed = time.monotonic()
            return bool(self.token != before)

        def before_request(self, request: Any, method: str, url: str, headers: Any) -> None:
            self.read_again()
            super().before_request(request, method, url, headers)

        def refresh(self, request: Any) -> None:
            """Use a newer token after a 401, even if another thread read it during the refused request."""
            if not self.read_again() and time.monotonic() - self.changed >= REQUEST_SECONDS:
                raise RefreshError(f"the access token in {path} was rejected, and the file has no newer one")

    credentials = FileCredentials()
    credentials.token = read_token(path)
    return credentials


def read_token(path: Path) -> str:
    """Return the token. Raises OSError, ValueError: the file can't be read, or holds none."""
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError("it holds no token")
    return token

"""The error of this machine that can't run a job."""

from __future__ import annotations


class RefusedError(Exception):
    """The job can't run here; its text and `fix` are for the user."""

    def __init__(self, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.fix = fix

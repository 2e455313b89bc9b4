"""Waits between the tries of a call that fails: each is twice as long as the one before, up to a limit."""

from __future__ import annotations


class Backoff:
    """The waits in seconds, from `first` to `longest`."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._next = first
        self._longest = longest

    def wait(self) -> float:
        """Return the wait after one more failure."""
        wait, self._next = self._next, min(2 * self._next, self._longest)
        return wait

    def reset(self) -> None:
        """Begin with the first wait again: a try has succeeded."""
        self._next = self._first

"""Messages between checkpoint threads over torchrun's store, independent of the training's collectives."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from launch_train.checkpointing.multipart_writer import CancelledError
from launch_train.common.errors import OutputError, SupersededError, TrainError
from launch_train.distributed.process_group import Ranks

POLL_SECONDS = 0.02


class StoreMessages:
    """Messages by key, in torchrun's store, or in a dict for a single process. A list is a message, a dict an error."""

    def __init__(self, ranks: Ranks) -> None:
        self._store = ranks.store
        self._local: dict[str, str] = {}

    def post(self, key: str, value: Any) -> None:
        """Post a list for the ranks that wait for `key`."""
        text = json.dumps(value)
        if self._store is None:
            self._local[key] = text
        else:
            self._store.set(f"save/{key}", text)

    def post_error(self, key: str, error: Exception) -> None:
        """Post an error: the waiting ranks raise it, as the nearest kind that can be sent."""
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), TrainError.__name__)
        self.post(key, {"error": str(error), "kind": kind})

    def wait(self, key: str, deadline: float, cancelled: threading.Event) -> Any:
        """Return what another rank posted.

        Raises the error it posted, OutputError at `deadline` (a time.monotonic()), and CancelledError once `cancelled`
        is set.
        """
        while (text := self._read(key)) is None:
            if cancelled.is_set():
                raise CancelledError("cancelled for another save")
            if time.monotonic() > deadline:
                raise OutputError("timed out waiting for the other ranks' shares")
            time.sleep(POLL_SECONDS)
        value = json.loads(text)
        if isinstance(value, dict):
            raise _KINDS[value["kind"]](value["error"])
        return value

    def _read(self, key: str) -> str | None:
        if self._store is None:
            return self._local.get(key)
        name = f"save/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None


_KINDS: dict[str, type[TrainError]] = {
    kind.__name__: kind for kind in (OutputError, SupersededError, CancelledError, TrainError)
}

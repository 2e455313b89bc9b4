"""How the ranks' saving threads leave each other word, beside a training that has its own collectives."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from launch_train.checkpointing.multipart_writer import CancelledError
from launch_train.common.errors import OutputError, SupersededError, TrainError
from launch_train.distributed.process_group import Ranks

POLL_SECONDS = 0.02


class Notes:
    """In torchrun's store, or in a dict for one process alone. A list is word; a dict is an error."""

    def __init__(self, ranks: Ranks) -> None:
        self._store = ranks.store
        self._here: dict[str, str] = {}

    def post(self, key: str, value: Any) -> None:
        """Leave word: a list, for whoever waits for `key`."""
        text = json.dumps(value)
        if self._store is None:
            self._here[key] = text
        else:
            self._store.set(f"save/{key}", text)

    def post_error(self, key: str, error: Exception) -> None:
        """Say what kept this rank from its work: whoever waits raises it, as the nearest kind that all know."""
        kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), TrainError.__name__)
        self.post(key, {"error": str(error), "kind": kind})

    def wait(self, key: str, deadline: float, cancelled: threading.Event) -> Any:
        """What another rank posted. Raises what kept it from its work, OutputError at `deadline` (of time.monotonic),
        and CancelledError once `cancelled` is set."""
        while (text := self._look(key)) is None:
            if cancelled.is_set():
                raise CancelledError("given up for another save")
            if time.monotonic() > deadline:
                raise OutputError("the other ranks' shares did not come in time")
            time.sleep(POLL_SECONDS)
        value = json.loads(text)
        if isinstance(value, dict):
            raise _KINDS[value["kind"]](value["error"])
        return value

    def _look(self, key: str) -> str | None:
        if self._store is None:
            return self._here.get(key)
        name = f"save/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None


_KINDS: dict[str, type[TrainError]] = {
    kind.__name__: kind for kind in (OutputError, SupersededError, CancelledError, TrainError)
}

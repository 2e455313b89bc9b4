"""What the node reads from the run folder, and the little that it writes there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train import contract
from train.errors import OutputError
from train.storage import Storage

_LOCK = re.compile(rf"^{contract.ATTEMPTS}/(\d{{4,}})\.json$")


@dataclass(frozen=True)
class Record:
    """The run folder as the node sees it. Without storage it is empty, and what is written is dropped."""

    storage: Storage | None

    def terminal(self) -> str | None:
        """Why the run must not be started again, or None."""
        text = self._read(contract.TERMINAL)
        return None if text is None else text.strip() or "no reason given"

    def attempt(self) -> int:
        """Number of the newest attempt; 1 when nobody has written one."""
        names = self.storage.list(f"{contract.ATTEMPTS}/") if self.storage else []
        return max((int(found[1]) for found in map(_LOCK.match, names) if found), default=1)

    def next_generation(self, attempt: int) -> int:
        """The number after the newest generation of the attempt, whichever container started that; from 0."""
        text = (self._read(contract.generation_record(attempt)) or "").strip()
        return int(text) + 1 if text.isdecimal() else 0

    def newest_checkpoint(self) -> str:
        """Name of the newest durable step; empty for none.

        Its folder's name alone: a process that dies each time while it writes the same step has made none.
        """
        names = self.storage.list(f"{contract.CHECKPOINTS}/") if self.storage else []
        return max((name.split("/")[1] for name in names), default="")

    def has_steps(self, attempt: int, generation: int) -> bool:
        """Whether a row of any step of this generation has come; every part of it is read, so ask of short ones."""
        begin = contract.metrics_part(attempt, generation, 0, 0).rsplit("-", 2)[0]
        parts = self.storage.list(f"{begin}-") if self.storage else []
        rows = (json.loads(line) for part in parts for line in (self._read(part) or "").splitlines())
        return any("event" not in row for row in rows)

    def write_terminal(self, reason: str) -> None:
        """Forbid every further start of the run."""
        self._write(contract.TERMINAL, f"{reason}\n")

    def write_generation(self, attempt: int, generation: int) -> None:
        """Note that a generation starts."""
        self._write(contract.generation_record(attempt), f"{generation}\n")

    def write_node(self, node: int, facts: Mapping[str, Any]) -> None:
        """Note what this node is. It is also the proof that the folder can be written."""
        self._write(contract.node_record(node), json.dumps(facts) + "\n")

    def _read(self, name: str) -> str | None:
        try:
            return self.storage.read(name).decode() if self.storage else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"{name} in the run folder can't be read: {error.strerror or error}") from error

    def _write(self, name: str, text: str) -> None:
        if self.storage:
            self.storage.write(name, text.encode())

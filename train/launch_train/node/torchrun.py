"""Start torchrun; a restart uses a process that has already imported PyTorch (node/torchrun_preloaded.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.node.command import TORCHRUN, Task
from launch_train.node.process import Child, Helper

PRELOADED: Final = str(Path(__file__).with_name("torchrun_preloaded.py"))


class Torchrun:
    """Starts torchrun for the generations of a task, one at a time."""

    def __init__(self, task: Task) -> None:
        self._module = task.target if task.is_trainer else ""
        self._standby: tuple[Helper, Mapping[str, str]] | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start torchrun. `argv`: as `command` returns it. Raises OSError."""
        at = argv.index(TORCHRUN)
        standby, self._standby = self._standby, None
        with suppress(OSError):  # the process was killed
            if standby:
                helper, was = standby
                changed = {name: env.get(name) for name in was.keys() | env.keys() if was.get(name) != env.get(name)}
                request = json.dumps({"argv": argv[at + 1 :], "env": changed})
                return Child(argv, env, started=helper.release(request.encode()))
        return Child([*argv[:at], PRELOADED, self._module, *argv[at + 1 :]] if self._module else argv, env)

    def prepare(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process of the next generation, if none waits. `argv`, `env`: of the current generation."""
        if not self._standby:
            with suppress(OSError):  # too many processes, perhaps temporarily
                self._standby = (Helper([*argv[: argv.index(TORCHRUN)], PRELOADED, self._module], env), env)

    def close(self) -> None:
        """Kill the process that waits."""
        if self._standby:
            self._standby[0].close(0.0)
            self._standby = None

"""How a training process ends: at once, and with a word to the node about why."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from train import contract
from train.contract import Exit

_DELIBERATE = frozenset(Exit) - {Exit.FAILED}


def leave(code: int, *, rank: int = 0) -> NoReturn:
    """End this process with `code`, without the interpreter's own exit, in which gloo may abort or hang.

    torchrun turns every failure into 1, so a deliberate end is also noted in the file that the node named. It ends all
    ranks as soon as one has gone: rank 0, which speaks for all, gets a moment.
    """
    if code and rank:
        time.sleep(1.0)
    if code in _DELIBERATE and (path := os.environ.get(contract.EXIT_FILE)):
        with Path(path).open("a") as file:
            file.write(f"{int(code)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))

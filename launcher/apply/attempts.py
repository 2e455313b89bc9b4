"""The lock of an attempt: one create-only object in the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from train import contract
from train.storage import Storage


def lock(storage: Storage, facts: Mapping[str, Any]) -> int:
    """Write the next free `attempts/NNNN.json` and return its number (from 1).

    Whoever creates the object has the attempt: of ten launches at once each gets a number of its own.
    """
    number = newest(storage) + 1
    while True:
        body = json.dumps({**facts, "time": time.time()}, sort_keys=True).encode()
        try:
            storage.write(contract.attempt_lock(number), body, create=True)
        except FileExistsError:
            number += 1
        else:
            return number


def newest(storage: Storage) -> int:
    """The newest attempt's number, 0 when there is none."""
    names = storage.list(f"{contract.ATTEMPTS}/")
    numbers = [int(stem) for name in names if (stem := name.rpartition("/")[2].removesuffix(".json")).isdigit()]
    return max(numbers, default=0)

"""The lock of an attempt, on a local run folder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.apply.attempts import lock
from train.storage import open_storage


def test_attempts_are_numbered_and_say_what_they_are(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert [lock(storage, {"region": "local"}), lock(storage, {"region": "local"})] == [1, 2]
    body = json.loads((tmp_path / "attempts" / "0002.json").read_text())
    assert body["region"] == "local"
    assert body["time"] > 0


def test_ten_at_once_get_ten_numbers(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    with ThreadPoolExecutor(10) as pool:
        numbers = list(pool.map(lambda _: lock(storage, {}), range(10)))
    assert sorted(numbers) == list(range(1, 11))

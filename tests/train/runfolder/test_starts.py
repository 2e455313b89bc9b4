"""Which steps of a run's starts are valid."""

from __future__ import annotations

import json
import math

import pytest

from launch_train.runfolder import parts_in_order
from launch_train.runfolder.starts import Start, last_valid_steps


@pytest.mark.parametrize(
    ("begins", "limits"),
    [
        ([], []),
        ([0], [math.inf]),
        ([0, 20], [20, math.inf]),
        ([0, 40, 20], [20, 20, math.inf]),  # the third start resumed from before the second
        ([0, 20, 60], [20, 60, math.inf]),
        ([0, None, 20], [20, 20, math.inf]),  # the second was killed before its first step
        ([0, 20, None], [20, math.inf, math.inf]),
        ([0, 0], [0, math.inf]),
    ],
)
def test_a_start_is_valid_up_to_the_step_from_which_a_later_one_resumed(
    begins: list[int | None], limits: list[float]
) -> None:
    assert last_valid_steps(begins) == limits


def test_a_start_begins_after_the_step_that_it_names_or_before_its_first_row() -> None:
    def begin(*records: object) -> int | None:
        start = Start((1, 0))
        start.add("".join(f"{json.dumps(record)}\n" for record in records).encode())
        start.close()
        return start.begins_after

    assert begin({"event": "start"}, {"event": "resumed", "step": 7}, {"step": 9}) == 7
    assert begin({"event": "resumed", "step": "7"}, {"step": 9}) == 8
    assert (begin(), begin({"step": 1})) == (None, 0)


def test_parts_are_in_the_order_of_their_numbers_not_of_their_names() -> None:
    names = [
        f"metrics/{name}.jsonl"
        for name in ("10000-0000-0000-000000", "0002-0000-0000-000001", "0002-0000-0000-000001-1")
    ]
    assert [numbers for numbers, _ in parts_in_order([*names, "plan.json"])] == [
        (2, 0, 0, 1, 0),
        (2, 0, 0, 1, 1),
        (10000, 0, 0, 0, 0),
    ]

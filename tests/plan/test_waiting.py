"""How long a plan's attempts may wait for machines, each and together."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import PlanRefused
from tests.plan.planning import planned, request

HOUR = 3600
TWO: dict[str, Any] = {"regions": ["us-central1", "us-east5"], "provisioning": ["spot", "flex-start"]}
H100: dict[str, Any] = {"machine": {"type": "h100", "gpus": 2}}


def test_the_default_depends_on_the_provisioning() -> None:
    made = planned(**TWO)
    assert [(one.provisioning, one.wait_seconds) for one in made.attempts] == [
        ("spot", HOUR),
        ("spot", HOUR),
        ("flex-start", 6 * HOUR),
        ("flex-start", 6 * HOUR),
    ]
    assert made.limits.wait_seconds == 6 * HOUR, "the longest of one attempt"
    assert (made.limits.wait_total_seconds, made.limits.wait_at_most_seconds) == (None, 14 * HOUR)


def test_on_compute_engine_flex_start_waits_two_hours_at_most() -> None:
    made = planned("vm", **H100, zones=["us-central1-a"], provisioning=["flex-start", "spot"])
    assert [one.wait_seconds for one in made.attempts] == [2 * HOUR, HOUR]
    long = planned("vm", **H100, zones=["us-central1-a"], provisioning=["flex-start"], limits={"wait": "6h"})
    assert [one.wait_seconds for one in long.attempts] == [2 * HOUR]


@pytest.mark.parametrize(
    ("limits", "waits", "at_most"),
    [
        ({"wait": "3h"}, [3 * HOUR] * 4, 12 * HOUR),
        ({"wait_total": "8h"}, [HOUR, HOUR, 6 * HOUR, 6 * HOUR], 8 * HOUR),
        ({"wait_total": "30m"}, [HOUR // 2] * 4, HOUR // 2),
        ({"wait": "3h", "wait_total": "7d"}, [3 * HOUR] * 4, 12 * HOUR),
    ],
)
def test_waits_of_the_spec(limits: dict[str, Any], waits: list[int], at_most: int) -> None:
    made = planned(**TWO, limits=limits)
    assert [one.wait_seconds for one in made.attempts] == waits
    assert made.limits.wait_at_most_seconds == at_most


def test_a_flex_start_request_always_says_how_long_it_waits() -> None:
    flex = request(provisioning=["flex-start"])["jobSpec"]["scheduling"]
    assert flex["maxWaitDuration"] == "21600s"
    short = request(provisioning=["flex-start"], limits={"wait_total": "30m"})["jobSpec"]["scheduling"]
    assert short["maxWaitDuration"] == "1800s"


def test_a_rehearsal_waits_for_nothing() -> None:
    made = planned("local", limits={"wait": "1h", "wait_total": "2h"})
    assert [one.wait_seconds for one in made.attempts] == [None]
    assert made.limits.wait_at_most_seconds is None


def test_a_total_too_short_for_any_attempt() -> None:
    with pytest.raises(PlanRefused, match=r"limits\.wait_total"):
        planned(limits={"wait_total": "89s"})
    assert planned(limits={"wait_total": "90s"}).limits.wait_at_most_seconds == 90

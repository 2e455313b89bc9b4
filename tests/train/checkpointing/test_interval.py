"""How often a run saves."""

from __future__ import annotations

import math

import pytest

from launch_train.checkpointing.interval import (
    Interval,
    expected_between,
    from_settings,
    young_interval,
)
from launch_train.common import contract
from launch_train.common.config import parse


def test_youngs_interval_loses_least() -> None:
    """Lost per second at interval t: cost / t for the saves, t / 2 / between for what is done again."""
    cost, between = 0.7, 8 * 3600.0

    def lost(seconds: float) -> float:
        return cost / seconds + seconds / 2 / between

    best = young_interval(cost, between)
    assert best == pytest.approx(200.8, rel=1e-3)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_auto_is_short_for_its_section() -> None:
    assert parse({"checkpoint": "auto"}) == parse({"checkpoint": {"minutes": "auto"}}) == parse({})
    assert parse({"checkpoint": "off"}).checkpoint.minutes == "off"


def test_launch_tells_how_often_machines_are_interrupted() -> None:
    one = from_settings(parse({}).checkpoint, {contract.MTBF: "8"})
    assert one.update(cost=0.5, write=2.0, trained=0.0, interruptions=0) == (
        "checkpoint interval: 2.83 min (a save costs 0.5 s; an interruption is expected every 8 h; Young's rule)"
    )
    assert one.seconds == pytest.approx(math.sqrt(2 * 0.5 * 8 * 3600))


def test_it_is_said_again_only_when_it_changes_by_much() -> None:
    one = Interval(None, 8.0)
    said = [one.update(cost, 1.0, 0.0, 0) is not None for cost in (0.5, 0.51, 0.6, 1.5, 1.6)]
    assert said == [True, False, False, True, False]


def test_its_limits() -> None:
    one = Interval(None, 8.0)
    one.update(cost=0.0, write=1.0, trained=0.0, interruptions=0)
    assert one.seconds == 30
    one.update(cost=0.0, write=100.0, trained=0.0, interruptions=0)
    assert one.seconds == 200
    one.update(cost=1e6, write=1.0, trained=0.0, interruptions=0)
    assert one.seconds == 3600


def test_a_fixed_one_learns_nothing() -> None:
    one = Interval(600.0, 8.0)
    assert one.update(cost=0.5, write=2.0, trained=0.0, interruptions=0) is None
    assert one.seconds == 600


@pytest.mark.parametrize(("save", "first"), [(0.0, 60), (3.0, 60), (4.0, 80), (15.0, 300), (1000.0, 300)])
def test_the_first_interval_follows_from_the_expected_duration_of_a_save(save: float, first: float) -> None:
    assert Interval(600.0, save_seconds=save).seconds == Interval(None, save_seconds=save).seconds == first
    assert Interval(math.inf, save_seconds=save).seconds == math.inf


def test_what_the_run_has_seen_counts() -> None:
    assert expected_between(8, 0, 0) == 8 * 3600
    assert expected_between(8, 24 * 3600, 3) == 8 * 3600
    assert expected_between(8, 2 * 3600, 4) == 2 * 3600

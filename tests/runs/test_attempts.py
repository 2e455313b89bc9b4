"""Which attempt follows: the rules, without any cloud."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.diagnosis import Kind, Scope
from launcher.plan.model import Attempt, Plan
from launcher.runs.attempts import (
    LONGEST_WAIT,
    RETRIES,
    AttemptEnd,
    AttemptEntry,
    attempts_summary,
    next_attempt,
    prevails,
)
from tests.plan.planning import planned

PLAN: Plan = planned(regions=["us-central1", "us-east5"], provisioning=["spot", "flex-start"])
SPOT_1, SPOT_2, FLEX_1, FLEX_2 = PLAN.attempts


def tried(attempt: Attempt, scope: Scope, kind: Kind = "stockout", number: int = 1, **fields: object) -> AttemptEntry:
    end = AttemptEnd(state=None, kind=kind, scope=scope, cause="because", fix="do this")
    return AttemptEntry(
        number=number,
        round=1,
        region=attempt.region,
        zone=attempt.zone,
        provisioning=attempt.provisioning,
        machine=attempt.machine_type,
        identity="",
        writer="",
        time=0.0,
        end=replace(end, **fields),
    )


def test_a_permanent_refusal_of_a_machine_type_leaves_the_other_types() -> None:
    plan = planned(
        machine={"type": ["h100", "a100-80gb"], "gpus": 2}, regions=["us-central1", "us-east5"], provisioning=["spot"]
    )
    first = plan.attempts[0]
    others = [attempt for attempt in plan.attempts if attempt.machine_type != first.machine_type]
    refused = tried(first, "permanent", "machine")
    assert next_attempt(plan, [refused]).attempt is others[0]
    assert next_attempt(plan, [refused, tried(others[0], "permanent", "machine", 2)]).attempt is None
    assert next_attempt(plan, [tried(first, "permanent", "invalid")]).attempt is None


def test_the_plans_order_is_kept() -> None:
    assert next_attempt(PLAN, []) == (SPOT_1, 0)
    assert next_attempt(replace(PLAN, attempts=()), []) == (None, 0)


@pytest.mark.parametrize(
    ("scope", "then"),
    [
        ("region", SPOT_2),
        ("region+provisioning", SPOT_2),
        ("zone", SPOT_2),
        ("transient", SPOT_1),
        ("permanent", None),
        ("project", None),
    ],
)
def test_the_scope_of_a_refusal(scope: Scope, then: Attempt | None) -> None:
    assert next_attempt(PLAN, [tried(SPOT_1, scope)]).attempt is then


def test_a_region_is_left_with_all_its_models() -> None:
    assert next_attempt(PLAN, [tried(SPOT_1, "region"), tried(SPOT_2, "region+provisioning")]).attempt is FLEX_2
    pairs = [tried(one, "region+provisioning") for one in (SPOT_1, SPOT_2, FLEX_1)]
    assert next_attempt(PLAN, pairs).attempt is FLEX_2
    assert next_attempt(PLAN, [*pairs, tried(FLEX_2, "region+provisioning")]).attempt is None


@pytest.mark.parametrize(
    ("scope", "kind", "rules_out"),
    [
        ("region+provisioning", "stockout", False),
        ("region+provisioning", "quota", False),
        ("region", "machine", False),
        ("region", "permission", True),
        ("project", "output", True),
    ],
)
def test_a_machine_type_without_capacity_or_quota_does_not_rule_out_another(
    scope: Scope, kind: Kind, rules_out: bool
) -> None:
    plan = planned(machine={"type": ["h100", "a100-80gb"], "gpus": 1}, provisioning=["spot"])
    h100, a100 = plan.attempts
    assert next_attempt(plan, [tried(h100, scope, kind)]).attempt is (None if rules_out else a100)
    assert next_attempt(plan, [tried(h100, scope, kind), tried(a100, scope, kind)]).attempt is None


def test_zones_of_a_region_are_apart() -> None:
    zones = [replace(SPOT_1, zone=f"us-central1-{letter}") for letter in "abc"]
    assert next_attempt(replace(PLAN, attempts=zones), [tried(zones[0], "zone")]).attempt is zones[1]
    assert (
        next_attempt(
            replace(PLAN, attempts=zones), [tried(zones[0], "zone"), tried(zones[1], "region+provisioning")]
        ).attempt
        is None
    )


def test_a_zone_without_room_for_one_model_may_have_it_for_another() -> None:
    here = replace(SPOT_1, zone="us-central1-a"), replace(FLEX_1, zone="us-central1-a")
    assert next_attempt(replace(PLAN, attempts=here), [tried(here[0], "zone")]).attempt is here[1]
    assert next_attempt(replace(PLAN, attempts=here), [tried(here[0], "zone", "machine")]).attempt is None


def test_the_same_place_again_after_a_pause_that_grows() -> None:
    tries = []
    for number in range(1, RETRIES + 1):
        tries.append(tried(SPOT_1, "transient", "busy", number))
        found, pause = next_attempt(PLAN, tries)
        assert (found, pause) == (SPOT_1, min(2.0 * 2 ** (number - 1), LONGEST_WAIT))
        assert next_attempt(PLAN, tries, 0.25).pause == pause / 4
    tries.append(tried(SPOT_1, "transient", "busy", 6))
    assert next_attempt(PLAN, tries) == (SPOT_2, 0), "five times again, and then elsewhere"


def test_googles_retry_time_is_used() -> None:
    assert next_attempt(PLAN, [tried(SPOT_1, "transient", "busy", retry_after=33.0)], 0.5).pause == 33
    assert next_attempt(PLAN, [tried(SPOT_1, "transient", "busy", retry_after=1e6)], 0.5).pause == 600
    assert next_attempt(PLAN, [tried(SPOT_1, "region", retry_after=33.0)]).pause == 0, "another place"


def test_a_lost_attempt_does_not_exclude_its_placement() -> None:
    assert next_attempt(PLAN, [tried(SPOT_1, "permanent", "lost")]).attempt is SPOT_1


def test_a_preemption_resets_earlier_refusals() -> None:
    tries = [tried(SPOT_1, "region"), tried(SPOT_2, "transient", "preempted", 2)]
    assert next_attempt(PLAN, tries) == (SPOT_1, 0)
    many = [tried(SPOT_1, "transient", "preempted", number) for number in range(1, 30)]
    assert next_attempt(PLAN, many) == (SPOT_1, LONGEST_WAIT)


def test_open_attempts_do_not_count() -> None:
    assert next_attempt(PLAN, [replace(tried(SPOT_1, "region"), end=None)]) == (SPOT_1, 0)


def test_all_attempts_are_listed_with_each_fix_once() -> None:
    lines, fixes = attempts_summary([tried(SPOT_1, "region"), tried(FLEX_2, "region", number=2)])
    assert lines == "  1. us-central1, spot: because\n  2. us-east5, flex-start: because"
    assert fixes == "do this"


@pytest.mark.parametrize(
    ("noted", "new", "holds"),
    [
        ("PENDING", "SUCCEEDED", "new"),  # a launch wanted to cancel it, and died
        ("PENDING", "FAILED", "new"),
        ("PENDING", "CANCELLED", "noted"),  # why, was noted before
        ("RUNNING", "DELETED", "noted"),
        ("PENDING", "RUNNING", "noted"),
        (None, "SUCCEEDED", "noted"),  # a refusal
        ("FAILED", "SUCCEEDED", "noted"),
        ("CANCELLED", "SUCCEEDED", "noted"),
    ],
)
def test_which_of_two_ends_holds(noted: str | None, new: str, holds: str) -> None:
    before, after = (AttemptEnd(state=state, kind="waited", scope="zone", cause="") for state in (noted, new))
    assert prevails(after, before) is (holds == "new")


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED", "DELETED"])
def test_a_job_that_came_after_its_attempt_was_given_up(state: str) -> None:
    lost = AttemptEnd(state=None, kind="lost", scope="transient", cause="no job was created")
    assert prevails(AttemptEnd(state=state, kind="user", scope="permanent", cause=""), lost)
    assert not prevails(AttemptEnd(state=None, kind="user", scope="permanent", cause=""), lost)
    entry = replace(tried(SPOT_1, "transient"), end=lost)
    assert not entry.is_open
    assert replace(entry, job="a job").is_open
    assert replace(entry, end=None).is_open


@pytest.mark.parametrize(
    ("kind", "state", "ends"),
    [
        ("succeeded", "SUCCEEDED", True),
        ("user", "FAILED", True),
        ("cancelled", "CANCELLED", True),
        ("expired", "EXPIRED", True),
        ("unknown", None, False),
        ("permission", "FAILED", False),
        ("stockout", "FAILED", False),
        ("preempted", "FAILED", False),
    ],
)
def test_what_ends_a_run(kind: Kind, state: str | None, ends: bool) -> None:
    assert AttemptEnd(state=state, kind=kind, scope="permanent", cause="").ends_run is ends

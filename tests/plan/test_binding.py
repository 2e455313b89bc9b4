"""The digest that binds jobs to their plan."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec.structs import replace

from launcher.jobs.job import PLAN_LABEL
from launcher.plan import binding
from launcher.plan.binding import bound, digest, read
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from tests.plan.planning import planned

DIGEST = "us-docker.pkg.dev/my-project/launch/train@sha256:" + "0" * 64


def label(plan: Plan) -> set[str]:
    return {attempt.request["labels"][PLAN_LABEL] for attempt in plan.attempts}


def test_every_request_of_a_dry_run_has_the_digest() -> None:
    plan = planned(regions=["us-central1", "us-east5"])
    assert label(plan) == {digest(plan)}
    assert len(digest(plan)) == 32
    assert bound(plan) == plan


def test_the_digest_survives_the_run_folder() -> None:
    plan = planned(limits={"usd": 500, "hours": 3})
    stored = read(msgspec.json.encode(plan))
    assert stored is not None
    assert {stored.digest} == {digest(plan)} == label(plan)


class Later(Plan, frozen=True, kw_only=True):
    """The plan of a later launch."""

    another: str = "a default"


def test_a_later_launch_finds_the_same_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned()
    monkeypatch.setattr(binding, "Plan", Later)
    stored = read(msgspec.json.encode(plan))
    assert stored is not None
    assert (type(stored.plan), stored.digest) == (Later, digest(plan))


def test_an_unknown_field_is_part_of_the_digest() -> None:
    data = json.loads(msgspec.json.encode(planned()))
    data["attempts"][0]["another"] = 1
    stored = read(json.dumps(data).encode())
    assert stored is not None
    assert stored.digest != digest(planned())


def test_the_digest_is_of_the_plan_that_was_read() -> None:
    text = msgspec.json.encode(planned())[:-1] + b', "project": "other"}'
    stored = read(text)
    assert stored is not None
    assert stored.digest == digest(stored.plan)


def test_the_image_is_part_of_the_digest() -> None:
    plan = planned()
    sent = bound(with_digest(plan, DIGEST))
    assert label(sent) == {digest(sent)} != label(plan)


@pytest.mark.parametrize("field", ["project", "run_folder", "warnings", "attempts", "spec"])
def test_every_field_is_part_of_the_digest(field: str) -> None:
    plan = planned()
    changed = {"warnings": ("x",), "attempts": (), "spec": {}}.get(field, "gs://other/x")
    assert digest(replace(plan, **{field: changed})) != digest(plan)


def test_a_vm_has_no_label_that_could_be_changed() -> None:
    assert PLAN_LABEL not in str(planned("vm", zones=["us-central1-a"], regions=None, output="gs://b/r"))

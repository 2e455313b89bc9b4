"""`launch selftest` before its first step: what it shows, asks and refuses."""

from __future__ import annotations

import sys

import pytest

from tests.cli.vms import Person
from tests.googlecloud import Fault, Status
from tests.selftest.world import World

HERE = ("--region", "us-central1")


def test_it_shows_what_it_creates_and_costs(world: World) -> None:
    """Every resource by its name; without a terminal nobody can answer, and nothing is created."""
    ran = world.launch(*HERE)
    assert ran.code == 2
    assert "Add --yes." in ran.err
    for resource in (
        "bucket",
        "repository",
        "build",
        "-cpu, n1-standard-4",
        "-gpu, g2-standard-4",
        "-vm, ",
        "-spot-vm",
    ):
        assert resource in ran.err
    assert "us-docker.pkg.dev/my-project/launch-selftest-" in ran.err
    assert "at most $3." in ran.err
    assert not [one for one in world.cloud.requests if one.method != "GET"]
    assert max(map(len, ran.err.splitlines())) <= 80


def test_more_than_it_may_cost_is_refused(world: World) -> None:
    ran = world.launch(*HERE, "--usd", "1.2", "--yes")
    assert ran.code == 2
    assert "more than --usd 1.20" in ran.err
    assert "--only push" in ran.err
    assert "--only cpu" not in ran.err
    assert not world.cloud.requests
    assert world.launch(*HERE, "--usd", "0.1", "--yes").err.endswith("Raise --usd.\n")


@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("", 2), ("y\n", 1)])
def test_it_asks(world: World, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    world.cloud.faults.add(Fault("*", Status(403), times=None))
    monkeypatch.setattr(sys, "stdin", Person(answer))
    assert world.launch(*HERE, "--only", "push").code == code
    assert bool(world.cloud.requests) == (code == 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "cpu,gpus"), "unknown part 'gpus' in --only"),
        ((), "no region is set"),
        (("--region", "us-central7"), "us-central7"),
        (("a.zip",), "needs --compare"),
        (("--compare", "a.zip"), "can't read the bundle"),
    ],
)
def test_what_is_refused(world: World, words: tuple[str, ...], said: str) -> None:
    ran = world.launch(*words, "--yes")
    assert (ran.code, said in ran.err) == (2, True), ran.shown
    assert not world.cloud.requests

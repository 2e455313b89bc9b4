"""`launch selftest` before its first step: what it shows, asks and refuses."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from launcher.cli.commands.selftest import revision
from launcher.errors import PlanRefused
from launcher.selftest import steps
from launcher.selftest.kit import Ran
from launcher.selftest.steps import ALL, BY_NAME, create_command
from launcher.testing.googlecloud import Fault, Status
from tests.cli.vms import Person
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
    assert "including boot disks" in ran.err
    assert "launch selftest --clean --project my-project" in ran.err
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
    ],
)
def test_what_is_refused(world: World, words: tuple[str, ...], said: str) -> None:
    ran = world.launch(*words, "--yes")
    assert (ran.code, said in ran.err) == (2, True), ran.shown
    assert not world.cloud.requests


def test_the_bound_counts_every_restart(world: World) -> None:
    """What is announced is the hard bound, and no training is restarted by Google or by launch."""
    with world.kit(bucket=False, image=False) as kit:
        for step in ALL:
            if step.spec and step.target != "project":
                limits = kit.launch(*create_command(kit, step), "--dry-run").checked().data["limits"]
                assert limits["restarts"] == 0, step.name
                assert steps.step_item(kit, step).usd == limits["usd_hard_bound"], step.name
        assert steps.total(steps.items(kit, ALL)) <= 5.0


def test_a_machine_without_a_known_bound_is_refused(world: World) -> None:
    plan = {"limits": {"usd_at_most": 1.0, "usd_hard_bound": None, "hours": 1}, "machine": {"machine_type": "x"}}
    with world.kit(bucket=False, image=False) as kit:
        unsure = replace(kit, launch=lambda *argv: Ran(argv, 0, json.dumps(plan), ""))
        with pytest.raises(PlanRefused, match="x in us-central1 is unknown"):
            steps.step_item(unsure, BY_NAME["cpu"])


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_made(world: World) -> None:
    world.folder = Path("/proc/self")
    ran = world.selftest("--only", "push")
    assert (ran.code, "cannot write the bundle" in ran.err) == (2, True), ran.shown
    assert not world.cloud.requests


def nobody() -> str:
    raise KeyError("getpwuid(): uid not found: 12345")


def test_a_machine_without_names_loses_no_result(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(metadata, "version", missing)
    ran = world.selftest("--only", "push")
    assert ran.code == 0, ran.shown
    assert list(world.folder.glob("launch-selftest-*.zip"))


def missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_an_error_in_the_bundle_hides_no_table(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr("launcher.cli.commands.selftest.write_bundle", broken)
    ran = world.selftest("--only", "push")
    assert (ran.code, world.left()) == (1, [])
    assert [line.split()[1] for line in ran.out.splitlines()][-1] == "append"
    assert "no space left on device" in ran.err


def test_the_commit_is_that_of_launch_alone(tmp_path: Path) -> None:
    """Installed below a repository of the user's, launch has none."""
    for command in (["init", "-q"], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    packages = tmp_path / "venv" / "site-packages"
    packages.mkdir(parents=True)
    assert revision(packages) == ""
    assert revision(tmp_path) == ""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "gcp-launch"\n')
    assert len(revision(tmp_path).removesuffix("-dirty")) == 40

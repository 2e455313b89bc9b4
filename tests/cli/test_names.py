"""Names of GPUs and regions as people type them, and values that are empty."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from launcher.catalog import load
from launcher.cli.app import app
from tests.command import launch


def refused(*argv: str) -> str:
    ran = launch(*argv, "--dry-run")
    assert (ran.code, ran.out) == (2, ""), ran.shown
    return ran.err


@pytest.mark.parametrize("command", ["vertex", "vm", "local"])
@pytest.mark.parametrize("typed", ["H100", "A3-HighGPU-8g", "L4"])
def test_gpu_names_ignore_case(command: str, typed: str) -> None:
    plans = [
        json.loads(launch(command, "--type", name, "--region", "any", "--dry-run", "-o", "json").out)
        for name in (typed, typed.lower())
    ]
    assert plans[0]["machine"] == plans[1]["machine"]
    assert plans[0]["run"] == plans[1]["run"]


def test_a_spec_with_capitals(tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = tmp_path_factory.mktemp("spec") / "job.yaml"
    spec.write_text("name: a\nmachine: {type: n1-standard-8, accelerator: T4}\nregions: [us-central1]\n")
    ran = launch("vertex", str(spec), "--dry-run", "-o", "json")
    assert json.loads(ran.out)["attempts"][0]["machine_type"] == "n1-standard-8", ran.shown


@pytest.mark.parametrize("command", ["vertex", "vm", "local"])
@pytest.mark.parametrize("typed", ["a100", "A100"])
def test_a100_needs_its_memory_size(command: str, typed: str) -> None:
    told = refused(command, "--type", typed, "--region", "any")
    assert [word in told for word in ("memory", "a100-40gb", "a100-80gb")] == [True] * 3


@pytest.mark.parametrize("typed", ["tpu", "TPU", "v5e", "v5p-8", "tpu-v6e", "ct5lp-hightpu-4t", "mi300", "MI300X"])
def test_accelerators_that_are_not_nvidias_are_not_supported(typed: str) -> None:
    told = refused("vertex", "--type", typed, "--region", "any")
    assert (typed in told, "not supported" in told, "NVIDIA" in told) == (True, True, True)
    assert "gb300" not in told.partition("Use a GPU:")[0]


def test_every_gpu_and_machine_of_the_catalog_is_supported() -> None:
    catalog = load()
    for name in (*(gpu.name for gpu in catalog.gpus.values() if not gpu.shut_down), *catalog.machines):
        shapes = catalog.machines.get(name)
        accelerator = shapes[0].gpu if shapes else None
        assert catalog.find(name.upper(), None, accelerator, "compute").name


@pytest.mark.parametrize("command", ["vertex", "vm"])
@pytest.mark.parametrize(("typed", "meant"), [("us-centrall1", "us-central1"), ("europe-west44", "europe-west4")])
def test_a_misspelt_region_gets_a_suggestion(command: str, typed: str, meant: str) -> None:
    told = refused(command, "--type", "l4", "--region", typed)
    assert (typed in told, f"{meant}?" in told) == (True, True)


def options() -> list[tuple[tuple[str, ...], str]]:
    """All options of all commands that take a value."""
    found = []
    commands = typer.main.get_command(app)
    groups: list[tuple[tuple[str, ...], TyperGroup]] = [((), commands)]  # type: ignore[list-item]  # Typer types its group as Click's command
    for path, group in groups:
        for name in group.list_commands(typer.Context(group)):
            command: Any = group.get_command(typer.Context(group), name)
            own = path if name == "make" else (*path, name)
            if isinstance(command, TyperGroup):
                groups.append((own, command))
            else:
                found += [
                    (own, one.opts[0])
                    for one in command.params
                    if one.param_type_name == "option" and not getattr(one, "is_flag", False)
                ]
    return found


def test_no_option_takes_an_empty_value() -> None:
    every = options()
    assert {option for _, option in every} >= {"--type", "--region", "--code", "--resume", "--zone", "--only", "-o"}
    for path, option in every:
        for typed in ([option, ""], *([[f"{option}="]] if option.startswith("--") else [])):
            ran = launch(*path, *typed)
            assert (ran.code, ran.out, option in ran.err) == (2, "", True), (path, typed, ran.shown)
            assert "empty" in ran.err, (path, typed)


def test_an_argument_must_not_be_empty_except_in_a_remote_command() -> None:
    assert "empty" in launch("status", "").err
    assert "empty" not in launch("ssh", "dev", "--", "echo", "").err
    assert launch("local", "--set", "env.A=''", "--dry-run").code == 0

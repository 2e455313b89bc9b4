"""`launch --help` and a dry run load nothing heavy: asserted in a fresh process, from what it really loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from launcher.cli.app import app
from launcher.cli.lazy_commands import COMMANDS, MAKE, VM_COMMANDS
from tests.rendered import JOB_SPECS

HEAVY = {
    "google",
    "grpc",
    "docker",
    "torch",
    "numpy",
    "pydantic",
    "requests",
    "tensorboard",
    "jsonschema",
    "hypothesis",
}
SPEC = JOB_SPECS / "vertex-2xh100.yaml"
VM_SPEC = JOB_SPECS / "vm-dlvm-ssh.yaml"

RUNNER = """
import sys, json
before = set(sys.modules)  # a .pth file of the environment may have loaded some
try:
    {statement}
finally:
    print("MODULES", json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["vertex", "--help"], ["export", "--help"], ["--version"]], ids=" ".join
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded = modules_of_launch(*arguments)
    assert "launcher.cli" in loaded
    assert not heavy(loaded)
    assert arguments == ["export", "--help"] or not {"yaml", "msgspec"} & loaded, "help needs no spec and no plan"


@pytest.mark.parametrize("output", ["text", "json", "yaml"])
@pytest.mark.parametrize(("target", "spec"), [("vertex", SPEC), ("vm", VM_SPEC)], ids=["vertex", "vm"])
def test_a_dry_run_loads_nothing_heavy(target: str, spec: Path, output: str) -> None:
    loaded = modules_of_launch(target, str(spec), "--dry-run", "-o", output)
    assert "launcher.plan.build" in loaded
    assert not heavy(loaded)
    assert "rich" not in loaded, "Typer's help needs rich; a plan does not"
    assert "packaging.specifiers" not in loaded, "without requirements no version is parsed"
    assert "dataclasses" not in loaded, "they take 1 ms each to define"
    assert "typing_extensions" not in loaded, "msgspec takes it for older Pythons only"
    unused = {"launcher.plan.cpu", "launcher.spec.syntax"}
    assert not unused & loaded, "those of other commands, and for invalid YAML"
    effects = tuple(f"launcher.{one}." for one in ("gcp", "vertex", "compute", "images", "ssh", "runs", "rehearsal"))
    assert {name for name in loaded if name.startswith(effects)} == {"launcher.images.source_files"}, "no effects"


def test_a_dry_run_of_a_local_job_without_code_looks_at_no_packages() -> None:
    loaded = modules_of_launch("local", str(JOB_SPECS / "quickstart.yaml"), "--dry-run")
    assert not heavy(loaded)
    assert "importlib.metadata" not in loaded


@pytest.mark.parametrize("command", [("vertex", "--dry-run"), ("check",), ("estimate",)], ids=" ".join)
def test_a_spec_without_code_loads_nothing_that_reads_code(command: tuple[str, ...]) -> None:
    loaded = modules_of_launch(command[0], str(SPEC), *command[1:])
    assert not {"launcher.inputs.user_code", "launcher.inputs.python_files"} & loaded
    assert "configparser" not in loaded, "gcloud isn't set up here"


def test_the_list_of_gpus_loads_nothing_heavy() -> None:
    loaded = modules_of_launch("gpus", "--region", "any")
    assert "launcher.catalog.offers" in loaded
    assert not heavy(loaded)
    assert not {
        name for name in loaded if name.startswith(("launcher.gcp.", "launcher.services.compute.", "launcher.plan."))
    }


def test_an_estimate_by_formula_loads_nothing_heavy() -> None:
    loaded = modules_of_launch("estimate", str(SPEC))
    assert "launcher.plan.estimate" in loaded
    assert not heavy(loaded)
    assert "launcher.plan.build" not in loaded, "it plans nothing"


def test_the_python_api_loads_nothing_heavy() -> None:
    loaded = modules_of("from launcher import api")
    assert {name for name in loaded if name.startswith("launcher.")} == {"launcher.api"}
    loaded = modules_of(f"from launcher import api; api.plan({str(SPEC)!r})")
    assert "launcher.plan.build" in loaded
    assert not heavy(loaded)
    loaded = modules_of("from launcher import api; api.submit, api.find, api.Run")
    assert "launcher.runs.driver" in loaded
    assert not heavy(loaded)


def test_a_command_loads_no_other() -> None:
    """Typer makes a command of each function that it is given: for all of them, a fifth of a dry run."""
    assert not {name for name in modules_of_launch("--help") if name.startswith("launcher.cli.commands.")}
    loaded = modules_of_launch("vertex", str(SPEC), "--dry-run")
    assert "launcher.cli.commands.vertex" in loaded
    assert {name for name in loaded if name.startswith("launcher.cli.commands.")} == {"launcher.cli.commands.vertex"}


def test_every_command_has_its_name() -> None:
    """And its file: one a command."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    assert group.list_commands(context) == [*COMMANDS]
    assert [group.get_command(context, name).name for name in COMMANDS] == [*COMMANDS]
    vm = group.get_command(context, "vm")
    assert [vm.get_command(context, name).name for name in vm.list_commands(context)] == [MAKE, *VM_COMMANDS]
    assert (group.get_command(context, "vmm"), vm.get_command(context, "vertex")) == (None, None)


def test_the_check_sees_a_heavy_module() -> None:
    assert heavy(modules_of("from google.protobuf import json_format")) == {"google"}
    assert heavy(modules_of("import numpy")) == {"numpy"}


def heavy(loaded: set[str]) -> set[str]:
    """The heavy packages among the modules in `loaded`."""
    return {name.partition(".")[0] for name in loaded} & HEAVY


def modules_of_launch(*arguments: str) -> set[str]:
    """All modules that `launch` has loaded when it ends."""
    return modules_of(f"sys.argv = ['launch', *{list(arguments)!r}]; from launcher.cli import run; run()")


def modules_of(statement: str) -> set[str]:
    """All modules that `statement` loads in a fresh process."""
    environment = {**os.environ, "CLOUDSDK_CORE_PROJECT": "my-project", "CLOUDSDK_CONFIG": os.devnull}
    command = [sys.executable, "-c", RUNNER.format(statement=statement)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stderr.rpartition("MODULES ")[2])
    return set(loaded)

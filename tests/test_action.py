"""The GitHub Action and the pre-commit hook: their files are valid, and their commands do what docs/ci.md says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands.test_check_against import commit, edit, git, spec
from tests.command import ROOT, WORLD

BIN = Path(sys.executable).parent
ACTION = ROOT / ".github" / "actions" / "check" / "action.yml"
HOOKS = ROOT / ".pre-commit-hooks.yaml"
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
"""How GitHub runs `shell: bash`."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What actions/checkout makes of a pull request: one commit, and a remote."""
    origin = tmp_path / "origin"
    (origin / "specs").mkdir(parents=True)
    (origin / "specs" / "a.yaml").write_text(spec("a"))
    git(origin, "init", "-q", "-b", "main")
    commit(origin)
    git(origin, "switch", "-q", "-c", "change")
    edit(origin / "specs" / "a.yaml", "steps: 100", "steps: 200")
    commit(origin)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", "--branch", "change", f"file://{origin}", str(clone))
    (tmp_path / "launch" / "bin").mkdir(parents=True)
    (tmp_path / "launch" / "bin" / "launch").symlink_to(BIN / "launch")
    return clone


def run_step(name: str, checkout: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action with its inputs, as GitHub does."""
    action = yaml.safe_load(ACTION.read_text())
    step = next(one for one in action["runs"]["steps"] if one["name"] == name)
    assert step["shell"] == "bash"
    values = {key: one["default"] for key, one in action["inputs"].items()} | inputs
    own = {
        key: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: values[found[1]], text)
        for key, text in step["env"].items()
    }
    env = WORLD | own | {"RUNNER_TEMP": str(checkout.parent), "GITHUB_WORKSPACE": str(checkout)}
    env["GITHUB_STEP_SUMMARY"] = str(checkout.parent / "summary.md")
    return subprocess.run(
        [*BASH, "-c", step["run"]], cwd=checkout, env=env, capture_output=True, text=True, check=False
    )


def test_the_action_installs_its_own_commit() -> None:
    action = yaml.safe_load(ACTION.read_text())
    install = action["runs"]["steps"][0]["run"]
    (path,) = re.findall(r'"\$GITHUB_ACTION_PATH/(.*)"', install)
    assert (ACTION.parent / path / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
    assert '"$RUNNER_TEMP/launch/bin/pip" install' in install


def test_no_script_has_an_input_in_its_text() -> None:
    """An input could be a command: `$(…)` in a branch's name."""
    steps = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    assert [one["name"] for one in steps if "${{" in one["run"]] == []
    for step in steps:
        text = f"#!/bin/bash\n{step['run']}"
        ran = subprocess.run(
            [BIN / "shellcheck", "--exclude=SC2086", "-"], input=text, capture_output=True, text=True, check=False
        )
        assert ran.stdout == ""


@pytest.mark.parametrize("specs", ["specs", ".", "specs/*.yaml specs/a.yaml"])
def test_the_check_passes(checkout: Path, specs: str) -> None:
    ran = run_step("Check", checkout, specs=specs)
    assert ran.returncode == 0, ran.stderr
    assert "1 spec: 1 pass" in ran.stdout


def test_a_problem_is_an_annotation_and_fails_the_job(checkout: Path) -> None:
    edit(checkout / "specs" / "a.yaml", "hours: 2", "hourz: 2")
    ran = run_step("Check", checkout)
    assert ran.returncode == 2
    assert "::error file=specs/a.yaml,line=6," in ran.stdout


def test_target_and_project_are_passed_on(checkout: Path) -> None:
    ran = run_step("Check", checkout, target="vm", project="Not A Project")
    assert (ran.returncode, "Not A Project" in ran.stdout) == (2, True)
    assert re.search(r"^pass +vm ", run_step("Check", checkout, target="vm").stdout, re.MULTILINE)


def test_changes_are_in_the_summary(checkout: Path) -> None:
    """The base branch is fetched: the checkout has one commit."""
    ran = run_step("Changes", checkout, against="origin/main")
    assert ran.returncode == 0, ran.stderr
    summary = (checkout.parent / "summary.md").read_text()
    assert summary.startswith("### Specs: 1 of 1 changed since `origin/main`")
    assert re.search(r"LAUNCH_CONFIG.steps` \| `100` \| `200` \|", summary)


def test_an_unknown_base_fails_the_job(checkout: Path) -> None:
    assert run_step("Changes", checkout, against="origin/no-such").returncode != 0


def test_the_hook_is_valid() -> None:
    ran = subprocess.run([BIN / "pre-commit", "validate-manifest", HOOKS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_the_hook_checks_all_specs(checkout: Path) -> None:
    (hook,) = yaml.safe_load(HOOKS.read_text())

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [*shlex.split(hook["entry"]), *hook.get("args", ()), *arguments]
        env = WORLD | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, check=False)

    assert run().returncode == run("specs/").returncode == 0
    edit(checkout / "specs" / "a.yaml", "hours: 2", "hourz: 2")
    ran = run()
    assert (ran.returncode, "specs/a.yaml:6" in ran.stdout) == (2, True)


def test_the_documentation_uses_existing_inputs_and_hooks() -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    blocks: list[Any] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    workflow, hooks = blocks
    (job,) = workflow["jobs"].values()
    used = next(one for one in job["steps"] if one["uses"].split("@")[0].endswith("/.github/actions/check"))
    assert set(used["with"]) <= set(yaml.safe_load(ACTION.read_text())["inputs"])
    known = {one["id"] for one in yaml.safe_load(HOOKS.read_text())}
    assert {one["id"] for one in hooks["repos"][0]["hooks"]} == known

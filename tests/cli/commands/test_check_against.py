"""`launch check --against REF`: what changes in the requests and the costs since a git commit."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.command import launch

SPEC = """\
name: NAME
machine: {type: l4}
provisioning: [spot, standard]
regions: [us-central1, us-east4]
output: gs://my-bucket/runs
limits: {hours: 2}
run:
  config: {steps: 100}
"""
CODE = "image: {code: ../src}\nrun: {script: mine.py}\n"


def spec(name: str) -> str:
    return SPEC.replace("NAME", name)


def with_code(name: str) -> str:
    return spec(name).partition("run:")[0] + CODE


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "commit.gpgsign=false")
    ran = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two specs, one of them with code, in one commit."""
    top = tmp_path / "repository"
    (top / "specs").mkdir(parents=True)
    (top / "src").mkdir()
    (top / "src" / "mine.py").write_text("print(1)\n")
    (top / "specs" / "a.yaml").write_text(spec("a"))
    (top / "specs" / "own.yaml").write_text(with_code("own"))
    git(top, "init", "-q", "-b", "main")
    commit(top)
    return top


def commit(top: Path) -> None:
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "a commit")


def data(
    top: Path, *words: str, code: int = 0, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> dict[str, dict[str, Any]]:
    ran = launch("check", *words, "--against", "main", "-o", "json", cwd=cwd or top, env=env)
    assert ran.code == code, ran.shown
    return {one["spec"]: one for one in json.loads(ran.out)["specs"]}


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_nothing_has_changed(repository: Path) -> None:
    assert {one["kind"] for one in data(repository).values()} == {"unchanged"}
    ran = launch("check", "--against", "HEAD", cwd=repository)
    assert (ran.code, ran.out) == (0, "### Specs: 0 of 2 changed since `HEAD`\n")


@pytest.mark.parametrize("target", ["vertex", "vm", "local"])
def test_fields_and_costs(repository: Path, target: str) -> None:
    edit(repository / "specs" / "a.yaml", "steps: 100", "steps: 200")
    edit(repository / "specs" / "a.yaml", "hours: 2", "hours: 4")
    found = data(repository, "--target", target)["specs/a.yaml"]
    fields = {one["field"]: (one["before"], one["after"]) for one in found["changes"]["fields"]}
    (steps,) = [values for field, values in fields.items() if field.endswith("LAUNCH_CONFIG.steps")]
    assert steps == ("100", "200")
    (hours,) = [values for field, values in fields.items() if field.endswith("LAUNCH_HOURS")]
    assert hours == ("2", "4")
    assert not [field for field in fields if "launch-" in field], "derived labels are no news"
    assert not [one for values in fields.values() for one in values if one and re.search(r"a-[0-9a-f]{8}", one)]
    before, after = found["before"]["usd_at_most"], found["after"]["usd_at_most"]
    assert found["changes"]["usd_at_most"] == ([before, after] if target != "local" else None)


def test_the_fallback_order(repository: Path) -> None:
    edit(repository / "specs" / "a.yaml", "regions: [us-central1, us-east4]", "regions: [us-central1]")
    (attempts,) = data(repository)["specs/a.yaml"]["changes"]["fields"]
    assert attempts["field"] == "attempts"
    assert attempts["before"] == "spot us-central1, spot us-east4, standard us-central1, standard us-east4"
    assert attempts["after"] == "spot us-central1, standard us-central1"


def test_a_field_of_some_attempts(repository: Path) -> None:
    """Only flex-start requests have the time that a job waits for machines."""
    edit(repository / "specs" / "a.yaml", "[spot, standard]", "[flex-start, standard]")
    commit(repository)
    edit(repository / "specs" / "a.yaml", "{hours: 2}", "{hours: 2, wait: 2h}")
    fields = data(repository)["specs/a.yaml"]["changes"]["fields"]
    (wait,) = [one for one in fields if "maxWaitDuration" in one["field"]]
    assert (wait["after"], wait["attempts"]) == ("7200s", "2 of 4 attempts")


def test_several_nodes_have_one_change(repository: Path) -> None:
    edit(repository / "specs" / "a.yaml", "{type: l4}", "{type: a3-highgpu-8g, nodes: 3}")
    commit(repository)
    edit(repository / "specs" / "a.yaml", "steps: 100", "steps: 200")
    (steps,) = data(repository, cwd=repository)["specs/a.yaml"]["changes"]["fields"] or [None]
    assert steps["field"].startswith("jobSpec.workerPoolSpecs[*].")


def test_changed_code_is_one_line_for_all_specs(repository: Path) -> None:
    (repository / "specs" / "own2.yaml").write_text(with_code("own2"))
    commit(repository)
    (repository / "src" / "more.py").write_text("print(2)\n")
    found = data(repository)
    assert found["specs/a.yaml"]["kind"] == "unchanged"
    changes = found["specs/own.yaml"]["changes"]
    assert (bool(changes["image"]), changes["fields"]) == (True, [])
    out = launch("check", "--against", "main", cwd=repository).out
    assert len([line for line in out.splitlines() if line]) == 2
    assert "`specs/own.yaml`, `specs/own2.yaml`" in out


def test_new_removed_and_renamed_specs(repository: Path) -> None:
    (repository / "specs" / "own.yaml").unlink()
    (repository / "specs" / "a.yaml").rename(repository / "specs" / "b.yaml")
    edit(repository / "specs" / "b.yaml", "steps: 100", "steps: 200")
    (repository / "specs" / "new.yaml").write_text(spec("new"))
    found = data(repository)
    assert {path: (one["kind"], one["renamed_from"]) for path, one in found.items()} == {
        "specs/b.yaml": ("changed", "specs/a.yaml"),
        "specs/new.yaml": ("new", None),
        "specs/own.yaml": ("removed", None),
    }
    assert data(repository, "specs/own.yaml")["specs/own.yaml"]["kind"] == "removed"
    out = launch("check", "--against", "main", cwd=repository).out
    assert "| `specs/b.yaml` | renamed from `specs/a.yaml`, changed |" in out
    assert "| `specs/own.yaml` | removed |" in out


def test_a_refused_spec_ends_with_its_exit_code(repository: Path) -> None:
    edit(repository / "specs" / "a.yaml", "hours: 2", "hourz: 2")
    found = data(repository, code=2)
    assert found["specs/a.yaml"]["kind"] == "changed"
    (problem,) = found["specs/a.yaml"]["after"]["problems"]
    assert (problem["file"], problem["line"]) == ("specs/a.yaml", 6)
    commit(repository)
    edit(repository / "specs" / "a.yaml", "hourz: 2", "hours: 2")
    assert data(repository)["specs/a.yaml"]["kind"] == "changed", "it was refused"
    assert "refused at `main`" in launch("check", "--against", "main", cwd=repository).out


def test_a_missing_script_names_no_temporary_folder(repository: Path) -> None:
    edit(repository / "specs" / "own.yaml", "mine.py", "yours.py")
    commit(repository)
    edit(repository / "specs" / "own.yaml", "yours.py", "mine.py")
    (problem,) = data(repository)["specs/own.yaml"]["before"]["problems"]
    assert problem["file"] == "specs/own.yaml"
    assert "in the code in src" in problem["text"]


def test_the_repository_and_its_working_tree_are_not_touched(repository: Path) -> None:
    edit(repository / "specs" / "a.yaml", "steps: 100", "steps: 200")
    (repository / "src" / "mine.py").write_text("print(2)\n")
    git(repository, "add", "src")
    (repository / "src" / "untracked.py").write_text("")
    before = state(repository)
    data(repository)
    assert state(repository) == before


def state(top: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_in_a_hook_git_names_another_index(repository: Path) -> None:
    """pre-commit and git set GIT_DIR and GIT_INDEX_FILE."""
    env = {"GIT_DIR": str(repository / ".git"), "GIT_INDEX_FILE": str(repository / ".git" / "index.lock")}
    assert {one["kind"] for one in data(repository, env=env).values()} == {"unchanged"}


def test_from_a_subfolder(repository: Path) -> None:
    assert [*data(repository, "a.yaml", cwd=repository / "specs")] == ["specs/a.yaml"]
    assert [*data(repository, cwd=repository / "specs")] == ["specs/a.yaml", "specs/own.yaml"]


def test_in_a_shallow_clone(repository: Path, tmp_path: Path) -> None:
    """What actions/checkout makes."""
    edit(repository / "specs" / "a.yaml", "steps: 100", "steps: 200")
    commit(repository)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(clone))
    assert {one["kind"] for one in data(clone).values()} == {"unchanged"}


@pytest.mark.parametrize("ref", ["origin/main", "no-such", "--all", "main:specs"])
def test_a_ref_that_does_not_exist(repository: Path, ref: str) -> None:
    ran = launch("check", f"--against={ref}", cwd=repository)
    assert (ran.code, ran.out) == (2, "")
    assert ref in ran.err
    assert ("git fetch origin main" in ran.err) == (ref == "origin/main")


def test_outside_a_repository(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(spec("a"))
    ran = launch("check", "a.yaml", "--against", "main", cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "git repository" in ran.err


def test_values_have_no_meaning_in_markdown(repository: Path) -> None:
    (repository / "specs" / "a.yaml").write_text(f"{spec('a')}env: {{A: 'x|y', B: '`b`', C: \"1\\n2\"}}\n")
    out = launch("check", "--against", "main", cwd=repository).out
    rows = [line for line in out.splitlines() if ".env." in line]
    assert len(rows) == 3
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in rows)

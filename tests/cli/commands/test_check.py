"""`launch check`: every spec is planned offline; results as a table, as JSON and as annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.ui.spec_changes import inline_code
from tests.command import ROOT, SPECS, launch
from tests.test_imports import heavy, modules_of_launch

GOOD = "name: good\nmachine: {type: l4}\nregions: [us-central1]\noutput: gs://my-bucket/runs\nlimits: {hours: 2}\n"
NOTHING = {"CLOUDSDK_CORE_PROJECT": "", "CLOUDSDK_CORE_ACCOUNT": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a spec that passes, in a subfolder."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "good.yaml").write_text(GOOD)
    return tmp_path


def data(*argv: str | Path, cwd: Path, code: int = 0, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    ran = launch("check", *argv, "-o", "json", cwd=cwd, env=env)
    assert ran.code == code, ran.shown
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_every_spec_of_the_project_passes_without_a_project_or_a_region() -> None:
    found = data(SPECS, cwd=ROOT, env=NOTHING)["specs"]
    assert {one["result"] for one in found} == {"pass"}
    assert {Path(one["spec"]) for one in found} >= set(SPECS.glob("*.yaml"))
    targets = {Path(one["spec"]).stem: one["target"] for one in found}
    assert (targets["quickstart"], targets["vm-dlvm-ssh"], targets["vertex-2xh100"]) == ("vertex", "vm", "vertex")


@pytest.mark.parametrize("output", ["gs://my-bucket/runs", "runs"])
@pytest.mark.parametrize(
    ("machine", "more", "problem"),
    [
        ("{type: h100, gpus: 8, nodes: 4}", "limits: {hours: 2, usd: 9}", "limits.usd"),
        ("{type: l4}", "secrets: {HF_TOKEN: projects/p/secrets/hf/versions/1}", "identity.service_account"),
    ],
)
def test_neither_a_local_output_nor_vms_hide_what_the_cloud_refuses(
    tmp_path: Path, output: str, machine: str, more: str, problem: str
) -> None:
    spec = (
        f"name: both\nmachine: {machine}\nregions: [us-central1]\noutput: {output}\n"
        "run: {config: {batch_size: 32}}\n"
    )
    (tmp_path / "job.yaml").write_text(spec)
    (passed,) = data("job.yaml", cwd=tmp_path)["specs"]
    assert (passed["result"], passed["target"]) == ("pass", "vertex")
    local = [one["line"] for one in passed["warnings"] if "output: runs is a folder on this machine" in one["text"]]
    assert local == ([4] if output == "runs" else [])
    (tmp_path / "job.yaml").write_text(f"{spec}{more}\n")
    (refused,) = data("job.yaml", cwd=tmp_path, code=2)["specs"]
    assert problem in refused["problems"][0]["text"] + refused["problems"][0]["hint"]


@pytest.mark.parametrize("output", ["gs://my-bucket/runs", "runs"])
def test_what_vertex_ai_refuses_is_tried_on_vms_whatever_the_output(tmp_path: Path, output: str) -> None:
    """Vertex AI needs more than the address of a Lustre file system."""
    spec = f"name: a\nmachine: {{type: l4}}\nregions: [us-central1]\noutput: {output}\nrun: {{config: {{}}}}\n"
    (tmp_path / "job.yaml").write_text(f"{spec}mounts: [{{lustre: '10.0.0.3@tcp:/y', path: /mnt/lustre/y}}]\n")
    (passed,) = data("job.yaml", cwd=tmp_path)["specs"]
    assert (passed["result"], passed["target"]) == ("pass", "vm")
    assert any(warning["text"].startswith("runs on VMs only: ") for warning in passed["warnings"])


def test_a_line_has_the_bound_of_the_dry_run(folder: Path) -> None:
    plan = json.loads(launch("vertex", "specs/good.yaml", "--dry-run", "-o", "json", cwd=folder).out)
    ran = launch("check", "specs", cwd=folder)
    assert (ran.code, ran.err) == (0, "")
    row = next(line for line in ran.out.splitlines() if "specs/good.yaml" in line).split()
    assert row[:3] == ["pass", "vertex", f"${plan['limits']['usd_at_most']:.2f}"]
    (found,) = data("specs", cwd=folder)["specs"]
    assert (found["usd_at_most"], found["run"]) == (plan["limits"]["usd_at_most"], plan["run"])


def test_the_folder_is_by_default_the_current_one(folder: Path) -> None:
    assert [one["spec"] for one in data(cwd=folder)["specs"]] == ["specs/good.yaml"]


def test_only_specs_of_a_folder_are_checked(folder: Path) -> None:
    (folder / "docker-compose.yaml").write_text("services: {}\n")
    (folder / "launch.yaml").write_text("project: {regions: [us-central1]}\n")
    (folder / "broken.yml").write_text("name: [\nmachine: {type: l4}\n")
    for hidden in (".github/workflows", "venv", "node_modules/x"):
        (folder / hidden).mkdir(parents=True)
        (folder / hidden / "job.yaml").write_text(GOOD)
    found = data(cwd=folder, code=2)
    assert {one["spec"]: one["result"] for one in found["specs"]} == {
        "broken.yml": "refused",
        "specs/good.yaml": "pass",
    }
    assert found["skipped"] == ["docker-compose.yaml"]


def test_no_spec_is_an_error(tmp_path: Path) -> None:
    ran = launch("check", cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "launch check" in ran.err


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GOOD.replace("hours", "hourz"), 5, "limits.hourz"),
        (GOOD.replace("us-central1", "us-central9"), 3, "us-central9"),
        (f"{GOOD}run: {{script: mine.py}}\n", 6, "mine.py"),
        (GOOD.replace("hours: 2", "hours: 2, usd: 1"), 5, "limits.usd"),
        ("name: a\n", None, "machine"),
    ],
    ids=["spec", "plan", "script", "cost", "missing"],
)
def test_a_refused_spec_has_its_line(folder: Path, text: str, line: int | None, words: str) -> None:
    (folder / "bad.yaml").write_text(text)
    found = data("bad.yaml", "specs/good.yaml", cwd=folder, code=2)
    bad, good = found["specs"]
    assert (bad["result"], good["result"]) == ("refused", "pass"), "one refused spec doesn't end the check"
    assert found["error"]["exit_code"] == 2
    (problem,) = bad["problems"]
    assert (problem["file"], problem["line"] if line else None) == ("bad.yaml", line)
    assert words in problem["text"]
    ran = launch("check", "bad.yaml", cwd=folder)
    assert ran.code == 2
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_cap_is_reported_in_its_file(folder: Path) -> None:
    (folder / "specs" / "launch.yaml").write_text("project:\n  max_usd_per_run: 1\n  machines: [h100]\n")
    (found,) = data("specs", cwd=folder, code=2)["specs"]
    assert {(one["file"], one["line"]) for one in found["problems"]} == {
        ("specs/launch.yaml", 2),
        ("specs/launch.yaml", 3),
    }


def test_annotations_are_at_file_and_line(folder: Path) -> None:
    (folder / "specs" / "a,b.yaml").write_text(GOOD.replace("hours: 2", "hours: 2, usd: 1"))
    (folder / "specs" / "good.yaml").write_text(f"{GOOD}zones: [us-central1-a]\n")
    ran = launch(
        "check", "specs", "--format", "github", "--target", "vertex", cwd=folder, env={"GITHUB_WORKSPACE": str(folder)}
    )
    assert ran.code == 2
    notes = [line for line in ran.out.splitlines() if line.startswith("::")]
    assert notes[0].startswith("::error file=specs/a%2Cb.yaml,line=5,title=launch check::limits.usd"), notes
    assert "%0A" in notes[0], "the hint is on a line of its own"
    assert notes[1].startswith("::warning file=specs/good.yaml,line=6,"), notes
    assert launch("check", "--format", "github", "-o", "json", cwd=folder).code == 2


def workflow_commands(log: str) -> list[str]:
    """Return the lines that GitHub's runner takes for commands: `::` first, or the older form `##[` anywhere.

    Source: actions/runner, src/Runner.Common/ActionCommand.cs.
    """
    return [line for line in re.split("\r\n|\r|\n", log) if line.lstrip().startswith("::") or "##[" in line]


HOSTILE_NAMES = (
    *("a\n::error::pwned", "b\r::add-mask::pwned", "::warning::pwned", "c ##[error]pwned"),
    "d\x1b[2J\n ::debug::pwned",
)


def test_no_name_and_no_value_becomes_a_workflow_command(folder: Path) -> None:
    for name in HOSTILE_NAMES:
        (folder / "specs" / f"{name}.yaml").write_text("name: a\nmachine: {type: ':: ::error::pwned ##[error]'}\n")
        (folder / "specs" / f"{name}-good.yaml").write_text(GOOD)
    ran = launch("check", "specs", "--format", "github", "--target", "vertex", cwd=folder)
    assert (ran.code, "\x1b" in ran.shown) == (2, False)
    notes = [line for line in ran.out.splitlines() if re.match("::(error|warning) file=[^:]*,line=[0-9]+,title=", line)]
    assert len(notes) >= len(HOSTILE_NAMES)
    assert workflow_commands(f"{ran.out}\n{ran.err}") == notes
    for name in HOSTILE_NAMES:
        missing = launch("check", f"no {name}", "--format", "github", cwd=folder)
        empty = launch("check", "specs", "--against", name, "--format", "github", cwd=folder)
        assert workflow_commands(missing.err + empty.shown) == []


@pytest.mark.parametrize("text", ["a`b", "a``b", "```", "`a", "a|b", "\n# a\n"])
def test_code_in_markdown_ends_where_the_text_ends(text: str) -> None:
    shown = inline_code(text)
    fence = shown[: len(shown) - len(shown.lstrip("`"))]
    inner = shown[len(fence) : -len(fence)]
    assert shown.endswith(fence)
    assert fence not in re.findall("`+", inner)
    assert inner.replace("\\|", "|").split() == text.split()


def test_the_file_of_an_annotation_is_relative_to_the_repository(folder: Path) -> None:
    (folder / "specs" / "bad.yaml").write_text("name: a\nmachine: {type: l5}\n")
    ran = launch("check", "bad.yaml", "--format", "github", cwd=folder / "specs", env={"GITHUB_WORKSPACE": str(folder)})
    assert "::error file=specs/bad.yaml,line=2," in ran.out


def test_the_project_can_be_set(folder: Path) -> None:
    (folder / "specs" / "good.yaml").write_text(GOOD.replace("output: gs://my-bucket/runs\n", ""))
    runs = [
        data("specs", *flags, cwd=folder, env=env)["specs"][0]["run"]
        for flags, env in (
            (("--project", "other-project"), {}),
            (("--project", "other-project"), NOTHING),
            ((), {"CLOUDSDK_CORE_PROJECT": "other-project"}),
            ((), {}),
        )
    ]
    assert runs[0] == runs[2] != runs[3]
    assert "--project" in launch("check", "specs", env=NOTHING, cwd=folder).out
    assert data("specs", "--project", "Not A Project", cwd=folder, code=2)["specs"][0]["result"] == "refused"


@pytest.mark.parametrize("target", ["vertex", "vm", "local"])
def test_the_target_can_be_set(folder: Path, target: str) -> None:
    (found,) = data("specs", "--target", target, cwd=folder)["specs"]
    assert (found["target"], found["result"]) == (target, "pass")


def test_a_machine_that_only_vms_have_is_checked_for_vms(folder: Path) -> None:
    """A warning reports it: a spec that was meant for Vertex AI must not pass silently."""
    (folder / "specs" / "good.yaml").write_text(GOOD.replace("l4", "h100").replace("us-central1", "asia-south2"))
    (refused,) = data("specs", "--target", "vertex", cwd=folder, code=2)["specs"]
    (found,) = data("specs", cwd=folder)["specs"]
    assert found["target"] == "vm"
    assert found["warnings"][0]["line"] == refused["problems"][0]["line"]
    assert refused["problems"][0]["text"] in found["warnings"][0]["text"]


def test_a_spec_that_is_a_link_is_no_code(folder: Path) -> None:
    """Nor is it an error that it leads out of the code's folder, as it is for code."""
    (folder / "code").mkdir()
    (folder / "code" / "mine.py").write_text("print(1)\n")
    (folder / "specs" / "good.yaml").write_text(f"{GOOD}run: {{script: mine.py}}\n")
    (folder / "code" / "linked.yaml").symlink_to(folder / "specs" / "good.yaml")
    ran = launch("vertex", "code/linked.yaml", "--dry-run", "-o", "json", cwd=folder)
    (found,) = data("code", cwd=folder)["specs"]
    assert found["run"] == json.loads(ran.out)["run"]


# --- Speed -----------------------------------------------------------------------------------------------------------


def test_a_check_loads_nothing_heavy() -> None:
    loaded = modules_of_launch("check", str(SPECS / "vertex-2xh100.yaml"))
    assert "launcher.plan.build" in loaded
    assert not heavy(loaded)
    assert "rich" not in loaded

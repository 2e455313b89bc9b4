"""The commands as a person meets them: what they print, where, and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher import __version__
from launcher.cli import show_error
from launcher.errors import LaunchError
from tests.command import launch
from tests.spec.hostile import merge_bomb

ANSWER = ("vertex", "--gpus", "2", "--type", "h100", "--dry-run")


def test_a_dry_run_needs_only_a_project() -> None:
    ran = launch(*ANSWER, env={"CLOUDSDK_CORE_ACCOUNT": ""})
    assert ran.code == 0
    assert "a3-highgpu-2g" in ran.out
    assert not ran.err


def test_the_plan_as_json() -> None:
    plan = json.loads(launch(*ANSWER, "-o", "json").out)
    assert {"run", "target", "image", "attempts", "limits", "warnings"} <= plan.keys()
    assert {"region", "zone", "machine_type", "provisioning", "usd_per_hour", "request"} <= plan["attempts"][0].keys()


def test_without_a_project() -> None:
    ran = launch(*ANSWER, env={"CLOUDSDK_CORE_PROJECT": ""})
    assert (ran.code, ran.out) == (2, "")
    assert "gcloud config set project" in ran.err


@pytest.mark.parametrize(
    "project", ["My Project", "my_project", "MY-PROJECT", "my-project-", "-my-project", "projects/my-project", "a" * 64]
)
def test_an_invalid_project_id_is_refused(project: str) -> None:
    for target in ("vertex", "vm"):
        ran = launch(target, *ANSWER[1:], env={"CLOUDSDK_CORE_PROJECT": project})
        assert (ran.code, ran.out) == (2, "")
        assert repr(project) in ran.err


@pytest.mark.parametrize("project", ["my-project", "example.com:my-project", "p1", "123-legacy"])
def test_a_valid_project_id_is_accepted(project: str) -> None:
    assert launch(*ANSWER, env={"CLOUDSDK_CORE_PROJECT": project}).code == 0


def test_a_rehearsal_needs_no_project_id() -> None:
    ran = launch("local", "--dry-run", env={"CLOUDSDK_CORE_PROJECT": "My Project"})
    assert ran.code == 0, ran.err


def test_gclouds_active_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "configurations").mkdir()
    (tmp_path / "active_config").write_text("work\n")
    (tmp_path / "configurations" / "config_work").write_text(
        "[core]\nproject = from-file\naccount = a@b.c\n[compute]\nregion = us-east5\n[ai]\nregion = us-central1\n"
    )
    env = {"CLOUDSDK_CORE_PROJECT": "", "CLOUDSDK_CONFIG": str(tmp_path)}
    plan = json.loads(launch(*ANSWER, "-o", "json", env=env).out)
    assert plan["project"] == "from-file"
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nmachine: {type: l4}\n")
    plan = json.loads(launch("vertex", spec, "--dry-run", "-o", "json", env=env).out)
    assert {attempt["region"] for attempt in plan["attempts"]} == {"us-central1"}
    plan = json.loads(
        launch("vertex", spec, "--dry-run", "-o", "json", env={**env, "CLOUDSDK_AI_REGION": "us-east4"}).out
    )
    assert {attempt["region"] for attempt in plan["attempts"]} == {"us-east4"}


def test_flags_override_the_spec(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nmachine: {type: h100, gpus: 8}\nregions: [us-central1]\nprovisioning: standard\n")
    flags: tuple[str, ...] = (
        "--type",
        "l4",
        "--gpus",
        "2",
        "--region",
        "us-east1",
        "--spot",
        "--hours",
        "3",
        "--name",
        "b",
    )
    flags = (*flags, "--output", "gs://x-y/z", "--set", "run.config.steps=7", "--set", "labels={team: a}")
    plan = json.loads(launch("vertex", spec, "--dry-run", "-o", "json", *flags).out)
    (attempt,) = plan["attempts"]
    assert (attempt["machine_type"], attempt["region"], attempt["provisioning"]) == (
        "g2-standard-24",
        "us-east1",
        "spot",
    )
    assert plan["limits"]["hours"] == 3
    assert plan["run"].startswith("b-")
    assert plan["spec"]["run"]["config"] == {"steps": 7}
    assert attempt["request"]["labels"]["team"] == "a"


def test_the_image_flag_replaces_the_specs_image(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nmachine: {type: l4}\nregions: any\nimage: {code: .}\nrun: {module: mine}\n")
    uri = "us-docker.pkg.dev/p/r/i@sha256:" + "a" * 64
    image = json.loads(launch("vertex", spec, "--image", uri, "--dry-run", "-o", "json").out)["image"]
    assert (image["uri"], image["pinned"]) == (uri, True)


def test_flex_start_and_spot_together() -> None:
    plan = json.loads(launch(*ANSWER, "--spot", "--flex-start", "--region", "us-central1", "-o", "json").out)
    assert [attempt["provisioning"] for attempt in plan["attempts"]] == ["flex-start", "spot"]


def test_a_zone_alone_sets_the_region() -> None:
    ran = launch("vm", "--type", "l4", "--zone", "us-east4-a", "--dry-run", "-o", "json")
    assert [attempt["zone"] for attempt in json.loads(ran.out)["attempts"]] == ["us-east4-a"]


def test_the_attempts_are_as_wide_as_the_longest_zone() -> None:
    zones = ("--zone", "northamerica-northeast1-b", "--zone", "us-central1-a")
    ran = launch("vm", "--type", "l4", *zones, "--dry-run")
    prices = [line.index("$") for line in ran.out.splitlines() if "  standard  " in line]
    assert (len(prices), len(set(prices))) == (2, 1), ran.shown


def test_a_custom_run_id() -> None:
    assert json.loads(launch(*ANSWER, "-o", "json", "--run-id", "mine-1").out)["run"] == "mine-1"


def test_a_dry_run_of_a_vm_needs_no_credentials() -> None:
    ran = launch("vm", "--type", "l4")
    assert ran.code == 4
    assert "gcloud auth application-default login" in ran.err
    assert launch("vm", "--type", "l4", "--dry-run").code == 0


def test_all_errors_of_a_spec_at_once(tmp_path: Path) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("name: Bad\nmachine: {typ: h100}\nlimits: {usd: -1}\n")
    ran = launch("vertex", spec, "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert [f":{line}:" in ran.err for line in (1, 2, 3)] == [True] * 3
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("flag", [False, True])
def test_a_yaml_merge_bomb_gives_a_short_message(tmp_path: Path, flag: bool) -> None:
    spec = tmp_path / "bomb.yaml"
    spec.write_bytes(b"name: a\nmachine: {type: l4}\n" if flag else merge_bomb())
    bomb = "run.config={" + ", ".join(f"k{n}: *a" for n in range(500)) + "}"
    ran = launch("vertex", spec, "--dry-run", *(["--set", bomb] if flag else []))
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) <= 40
    assert len(ran.err) < 4_000
    assert "more" in ran.err.splitlines()[-1]


def test_a_long_error_is_cut_and_its_hint_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    hints = "\n".join(f"hint {n}" for n in range(3))
    show_error(LaunchError("\n".join(f"line {n}" for n in range(1000)), hints))
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 40
    assert (shown[0], shown[35], shown[36], shown[39]) == ("error: line 0", "line 35", "… and 964 more lines", "hint 2")
    show_error(LaunchError("\n".join("x" * 40), "\n".join("y" * 100)))
    shown = capsys.readouterr().err.splitlines()
    assert (len(shown), shown[19], shown[39]) == (40, "… and 21 more lines", "… and 81 more lines")
    show_error(LaunchError("\n".join("x" * 40)))
    assert len(capsys.readouterr().err.splitlines()) == 40


def test_code_is_part_of_the_run_and_ignored_files_are_not(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nmachine: {type: l4}\nregions: any\nimage: {code: src}\nrun: {module: mine}\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("print(1)\n")

    def plan() -> tuple[str, str]:
        found = json.loads(launch("vertex", spec, "--dry-run", "-o", "json").out)
        return found["run"], found["image"]["uri"]

    first = plan()
    (tmp_path / "src" / "mine.pyc").write_text("x")
    (tmp_path / "src" / "__pycache__").mkdir()
    (tmp_path / "src" / "__pycache__" / "x.py").write_text("x")
    (tmp_path / "src" / ".gitignore").write_text("*.pyc\n.gitignore\n")
    assert plan() == first
    (tmp_path / "src" / "mine.py").write_text("print(2)\n")
    assert plan()[0] != first[0]
    assert plan()[1] != first[1]


def test_the_plan_shows_the_codes_size_and_warns_of_much(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: a\nmachine: {type: l4}\nregions: any\nimage: {code: src}\nrun: {module: mine}\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("print(1)\n")

    def of_code() -> tuple[dict[str, Any], list[str], str]:
        found = json.loads(launch("vertex", spec, "--dry-run", "-o", "json").out)
        page = launch("vertex", spec, "--dry-run").out
        (line,) = [line for line in page.splitlines() if line.startswith("code ")]
        return found["image"], [told for told in found["warnings"] if "MB of code" in told], line

    image, warnings, line = of_code()
    assert (image["files"], image["size"], warnings) == (1, 9, [])
    assert re.search(r"1 file\b.*\b9 B", line)
    with (tmp_path / "src" / "weights.bin").open("wb") as file:
        file.truncate(100_000_001)
    image, warnings, line = of_code()
    assert (image["files"], image["size"]) == (2, 100_000_010)
    assert re.search(r"2 files\b.*\b100 MB", line)
    assert len(warnings) == 1
    assert ".dockerignore" in warnings[0]


def test_the_spec_and_run_folders_are_not_code(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    text = "name: a\nmachine: {type: l4}\nregions: any\nrun: {script: mine.py}\n"
    spec.write_text(text)
    (tmp_path / "mine.py").write_text("print(1)\n")

    def run() -> str:
        return str(json.loads(launch("local", spec, "--dry-run", "-o", "json", cwd=tmp_path).out)["run"])

    first = run()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").write_text("written by a run")
    spec.write_text(text + "limits: {hours: 3}\n")
    assert run() == first
    (tmp_path / "mine.py").write_text("print(2)\n")
    assert run() != first


@pytest.mark.parametrize("field", ["code", "requirements"])
def test_a_missing_folder_or_file_is_refused(tmp_path: Path, field: str) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(f"name: a\nmachine: {{type: l4}}\nimage: {{{field}: missing}}\nrun: {{module: m}}\n")
    ran = launch("vertex", spec, "--dry-run")
    assert ran.code == 2
    assert "missing" in ran.err


def test_init_writes_a_spec_that_works_and_never_overwrites(tmp_path: Path) -> None:
    assert launch("init", cwd=tmp_path).code == 0
    text = (tmp_path / "job.yaml").read_text()
    assert launch("local", "job.yaml", "--dry-run", cwd=tmp_path).code == 0
    again = launch("init", cwd=tmp_path)
    assert again.code == 2
    assert (tmp_path / "job.yaml").read_text() == text
    assert launch("init", "other.yaml", cwd=tmp_path).code == 0


def test_a_python_file_as_spec_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text("import torch\n")
    ran = launch("local", "my_train.py", cwd=tmp_path)
    assert ran.code == 2
    assert "script: my_train.py" in ran.err


def test_version_and_help() -> None:
    assert launch("--version").out.strip() == __version__
    shown = launch("--help").out
    assert [name in shown for name in ("vertex", "vm", "local", "init", "schema")] == [True] * 5
    assert max(map(len, launch("vertex", "--help").out.splitlines())) <= 80


def test_local_dry_run_starts_nothing(tmp_path: Path) -> None:
    ran = launch("local", "--gpus", "3", "--type", "h100", "--dry-run", "--output", tmp_path / "runs")
    assert ran.code == 0
    assert "Nothing was started" in ran.out
    assert not (tmp_path / "runs").exists()


def test_local_refuses_a_bucket_without_credentials() -> None:
    ran = launch("local", "--output", "gs://bucket/runs")
    assert ran.code == 4
    assert "gcloud auth application-default login" in ran.err


def test_the_first_plan_says_time_and_cost_in_25_lines_and_explain_says_why() -> None:
    argv = ("vertex", "--gpus", "2", "--type", "h100")
    page, reasons = launch(*argv, "--dry-run").out, launch(*argv, "--explain").out
    assert len(page.splitlines()) <= 25
    assert "time      about 10 min: 10 min to start (assumed), 11 s for 300 steps" in page
    assert "cost      ≈$1." in page
    for reason in ("hard bound", "price ceiling:", "account   ", "no limits.wait_total", "(with boot disk) × 1 node"):
        assert (reason in page, reason in reasons) == (False, True), reason
    attempts = len(json.loads(launch(*argv, "--dry-run", "-o", "json").out)["attempts"])
    assert sum(line.lstrip()[:2].strip().isdigit() for line in reasons.splitlines()) == attempts


@pytest.mark.parametrize("nodes", [1, 3, 5, 7])
def test_a_plan_with_one_place_names_no_dearest(nodes: int) -> None:
    argv = ("vertex", "--type", "l4", "--gpus", "2", "--nodes", str(nodes), "--hours", "5", "--region", "us-central1")
    more = ("--provisioning", "standard", "--set", "run.config.batch_size=210", "--dry-run")
    page = launch(*argv, *more).out
    assert re.search(r"in 5 h at most \$[\d,.]+ there\n", page)
    assert "dearest" not in page


def test_a_launch_without_a_spec_says_that_the_folders_own_is_not_used(tmp_path: Path) -> None:
    assert "is not used" not in launch("vertex", "--dry-run", cwd=tmp_path).out
    launch("init", cwd=tmp_path)
    page = launch("vertex", "--dry-run", cwd=tmp_path).out
    assert "job.yaml in this folder is not used. To run it: launch vertex job.yaml" in page
    assert "is not used" not in launch("vertex", "job.yaml", "--dry-run", cwd=tmp_path).out


def test_a_setting_of_the_trainer_at_the_top_level_is_placed() -> None:
    assert "`steps` belongs under `run.config`" in launch("vertex", "--set", "steps=40", "--dry-run").err


def test_the_page_names_the_dearest_place_and_whose_prices_the_table_has() -> None:
    page = launch(
        "vertex", "--type", "h100", "--gpus", "8", "--nodes", "2", "--set", "run.config.batch_size=64", "--dry-run"
    ).out
    assert re.search(r"in 24 h at most \$[\d,.]+ there, \$[\d,.]+ in\s+[a-z]+-[a-z]+\d\n", page)
    assert ", prices per node:" in page

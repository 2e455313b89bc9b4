"""Several people in one project: whose run it is, and the caps of a launch.yaml beside the spec."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.jobs.job import OWNER_LABEL, RUN_LABEL
from launcher.plan.names import is_of_another, is_owned_by, owner_value
from launcher.testing.googlecloud import FakeClock
from tests.cli.cloudjobs import RUNS, Job
from tests.cli.vms import Person, Vms
from tests.command import launch

ME, OTHER = "me@example.com", "Somebody.Else@example.com"
SPEC = """\
name: job
machine: {type: l4}
regions: [us-central1]
limits: {hours: 10}
"""

# --- The label -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("account", [ME, OTHER, "a" * 90 + "@example.com", "launch@p.iam.gserviceaccount.com"])
@pytest.mark.parametrize("style", ["hashed", "plain"])
def test_an_owner_is_a_valid_label_value(account: str, style: str) -> None:
    value = owner_value(account, style)  # type: ignore[arg-type]  # one of the styles
    assert re.fullmatch(r"[a-z0-9_-]{1,63}", value)
    assert is_owned_by({OWNER_LABEL: value}, account)
    assert is_owned_by({OWNER_LABEL: value}, account.upper())
    assert is_of_another({OWNER_LABEL: value}, "third@example.com")
    assert is_of_another({OWNER_LABEL: value}, ""), "without an account, nobody knows"


def test_a_run_of_an_older_launch_belongs_to_nobody() -> None:
    assert not is_of_another({}, ME)
    assert not is_owned_by({}, ME)
    assert owner_value("", "hashed") == owner_value(ME, "none") == ""


@pytest.mark.parametrize("target", [["vertex"], ["vm", "--run"]])
def test_the_owner_changes_neither_the_run_nor_the_identity(tmp_path: Path, target: list[str]) -> None:
    def labels(account: str, style: str = "hashed") -> dict[str, str]:
        (tmp_path / "launch.yaml").write_text(f"project: {{owner_label: {style}}}\n")
        env = {"CLOUDSDK_CORE_ACCOUNT": account, "USER": "me", "LOGNAME": "me"}
        words = [target[0], "job.yaml", *target[1:], "--dry-run", "-o", "json"]
        data = json.loads(launch(*words, env=env, cwd=tmp_path).out)
        request = data["attempts"][0]["request"]
        return {**request.get("instanceProperties", request)["labels"], "run": data["run"]}

    (tmp_path / "job.yaml").write_text(SPEC)
    hashed, plain, none = (labels(ME, style) for style in ("hashed", "plain", "none"))
    assert (hashed.pop(OWNER_LABEL), plain.pop(OWNER_LABEL)) == (owner_value(ME, "hashed"), "me-example-com")
    for found in (hashed, plain, none):
        found.pop("launch-plan", None)
    assert hashed == plain == none
    assert OWNER_LABEL not in labels(""), "no account, no label"


# --- Somebody else's run ---------------------------------------------------------------------------------------------


def test_cancel_of_somebody_elses_run_is_refused_without_a_terminal(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.env["CLOUDSDK_CORE_ACCOUNT"] = OTHER
    ran = job.launch("cancel", run, code=2)
    assert f"launch cancel {run} --yes" in ran.err
    assert job.data("status", run)["state"] != "CANCELLED"
    assert job.data("cancel", run, "--yes")["state"] == "CANCELLED"


@pytest.mark.parametrize(("answer", "state"), [("n\n", "RUNNING"), ("\n", "RUNNING"), ("y\n", "CANCELLED")])
def test_cancel_of_somebody_elses_run_asks(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, answer: str, state: str
) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.env["CLOUDSDK_CORE_ACCOUNT"] = OTHER
    clock.advance(60)
    monkeypatch.setattr(sys, "stdin", Person(answer))
    ran = job.launch("cancel", run, code=0 if state == "CANCELLED" else 1)
    assert "[y/N]" in ran.err
    assert job.data("status", run)["state"] == state


def test_my_own_run_is_cancelled_without_a_question(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    assert job.data("cancel", run)["state"] == "CANCELLED"


def test_status_lists_my_runs(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    mine = job.data("vertex", "job.yaml", "--detach")["run"]
    job.env["CLOUDSDK_CORE_ACCOUNT"] = OTHER
    others = job.data("vertex", "job.yaml", "--detach")["run"]
    assert others != mine
    assert [one["run"] for one in job.data("status", "--mine")["runs"]] == [others]
    assert {one["run"] for one in job.data("status")["runs"]} == {mine, others}
    job.env["CLOUDSDK_CORE_ACCOUNT"] = ""
    assert "gcloud auth login" in job.launch("runs", "--cloud", "--mine", code=2).err
    assert "gcloud auth login" in job.launch("status", "--mine").err


def test_vm_list_mine_and_delete_of_somebody_elses_vm(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, account in (("a", ME), ("b", OTHER)):
        vms.make(name, labels={RUN_LABEL: name, OWNER_LABEL: owner_value(account, "hashed")})
    vms.make("old")
    vms.env["CLOUDSDK_CORE_ACCOUNT"] = ME
    assert [one["name"] for one in vms.data("list", "--mine")["machines"]] == ["a"]
    assert len(vms.data("list")["machines"]) == 3
    monkeypatch.setattr(sys, "stdin", Person("n\n"))
    assert "another account" in vms.launch("delete", "b", code=1).err
    assert "another account" not in vms.launch("delete", "a", code=1).err


OTHERS_VM = {RUN_LABEL: "dev", OWNER_LABEL: owner_value(OTHER, "hashed")}


@pytest.mark.parametrize(
    ("before", "words", "status"),
    [
        ([], ["stop", "dev"], "TERMINATED"),
        (["stop", "dev", "--yes"], ["start", "dev"], "RUNNING"),
        ([], ["extend", "dev", "--lease", "4h"], "RUNNING"),
    ],
    ids=["stop", "start", "extend"],
)
def test_stop_start_and_extend_of_somebody_elses_vm_ask(
    vms: Vms, monkeypatch: pytest.MonkeyPatch, before: list[str], words: list[str], status: str
) -> None:
    vms.make("dev", labels=OTHERS_VM)
    if before:
        vms.launch(*before)
    untouched, requests = vms.status("dev"), vms.asked("POST")
    assert f"launch vm {' '.join(words)} --zone us-central1-a --yes" in vms.launch(*words, code=2).err
    monkeypatch.setattr(sys, "stdin", Person("n\n"))
    assert "another account" in vms.launch(*words, code=1).err
    assert (vms.status("dev"), vms.asked("POST")) == (untouched, requests)
    monkeypatch.setattr(sys, "stdin", Person("y\n"))
    vms.launch(*words)
    assert vms.asked("POST") != requests
    assert vms.status("dev") == status


def test_my_own_vm_and_a_change_of_nothing_ask_nothing(vms: Vms) -> None:
    vms.make("dev", labels={**OTHERS_VM, OWNER_LABEL: owner_value(ME, "hashed")})
    vms.make("others", labels=OTHERS_VM)
    vms.env["CLOUDSDK_CORE_ACCOUNT"] = ME
    vms.launch("extend", "dev", "--lease", "4h")
    vms.launch("stop", "dev")
    vms.launch("start", "dev")
    vms.launch("start", "others")  # it runs already


# --- Caps ------------------------------------------------------------------------------------------------------------


CAPS = {
    "max_usd_per_run: 1": "--hours",
    "regions: [europe-west4, us-east4]": "--region europe-west4",
    "machines: [h100, a2-highgpu-1g]": "l4",
    "required_labels: [team, cost-centre]": "team: …, cost-centre: …",
}


@pytest.mark.parametrize("target", [["vertex"], ["vm"], ["vm", "--run"]], ids=" ".join)
def test_a_plan_beyond_caps_is_refused_with_all_of_them_at_once(tmp_path: Path, target: list[str]) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / "launch.yaml").write_text("".join(["project:\n", *(f"  {cap}\n" for cap in CAPS)]))
    ran = launch(target[0], "job.yaml", *target[1:], "--dry-run", cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    text = " ".join(ran.err.split())
    assert [line for line in range(2, 6) if f"launch.yaml:{line}: " not in text] == []
    assert [words for words in CAPS.values() if words not in text] == []


@pytest.mark.parametrize(
    "caps",
    [
        "max_usd_per_run: 1000",
        "regions: [us-central1]",
        "machines: [l4]",
        "machines: [g2-standard-12, g2-standard-4]",
        "required_labels: []",
    ],
)
def test_a_plan_within_the_caps(tmp_path: Path, caps: str) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / "launch.yaml").write_text(f"project: {{{caps}}}\n")
    assert launch("vertex", "job.yaml", "--dry-run", cwd=tmp_path).code == 0


def test_the_lowest_cap_wins(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    (tmp_path / "launch.yaml").write_text("project: {max_usd_per_run: 1000}\n")
    assert "limits.usd" in launch("vertex", "job.yaml", "--usd", "1", "--dry-run", cwd=tmp_path).err
    (tmp_path / "launch.yaml").write_text("project: {max_usd_per_run: 1}\n")
    assert "launch.yaml:1" in launch("vertex", "job.yaml", "--usd", "1000", "--dry-run", cwd=tmp_path).err


def test_a_cap_lowered_since_applies_to_a_resume_with_the_spec(job: Job) -> None:
    """A resume without it repeats the stored plan, which has no folder (docs/teams.md)."""
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.launch("cancel", run)
    (job.folder / "launch.yaml").write_text("project: {max_usd_per_run: 1}\n")
    assert "launch.yaml:1: " in job.launch("vertex", "job.yaml", "--resume", run, "--detach", code=2).err
    assert job.data("status", run)["state"] == "CANCELLED"
    assert job.data("vertex", "--resume", run, "--detach")["run"] == run


def test_only_the_file_beside_the_spec_counts(tmp_path: Path) -> None:
    """Not one that merely is in the current folder; and a run on this machine has no caps."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "job.yaml").write_text(SPEC)
    (tmp_path / "launch.yaml").write_text("project: {max_usd_per_run: 1}\n")
    assert launch("vertex", "specs/job.yaml", "--dry-run", cwd=tmp_path).code == 0
    assert launch("vertex", "--region", "us-central1", "--dry-run", cwd=tmp_path).code == 0
    (tmp_path / "launch.yaml").rename(tmp_path / "specs" / "launch.yaml")
    assert "specs/launch.yaml:1" in launch("vertex", "specs/job.yaml", "--dry-run", cwd=tmp_path).err
    assert launch("local", "specs/job.yaml", "--dry-run", cwd=tmp_path).code == 0


def test_launch_yaml_is_no_code(tmp_path: Path) -> None:
    """Another cap is the same run."""
    (tmp_path / "mine.py").write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text(f"{SPEC}run: {{script: mine.py}}\n")

    def run() -> Any:
        return json.loads(launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path).out)["run"]

    before = run()
    (tmp_path / "launch.yaml").write_text("project: {max_usd_per_run: 1000}\n")
    assert run() == before

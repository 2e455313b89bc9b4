"""Settings files: launch.yaml beside the spec, and the user's config.yaml."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher import api
from launcher.jobs.job import OWNER_LABEL
from launcher.plan.names import owner_value
from launcher.spec.project_file import user_settings_path
from tests.command import WORLD, Ran, launch

BARE = "name: job\nmachine: {type: l4}\nlimits: {hours: 2}\nrun: {config: {steps: 3}}\n"
USER = """\
project: {id: users-project, max_usd_per_run: 50}
regions: [us-east4]
image:
  repository: europe-docker.pkg.dev/users-project/images
output: gs://users-bucket/runs
labels: {team: vision, owner: ada}
"""


class World:
    """A folder with specs, the user's settings, and a project of gcloud's own configuration."""

    def __init__(self, folder: Path) -> None:
        self.specs = folder / "specs"
        self.user = folder / "settings" / "launch" / "config.yaml"
        gcloud = folder / "gcloud" / "configurations"
        for one in (self.specs, self.user.parent, gcloud):
            one.mkdir(parents=True)
        (gcloud / "config_default").write_text("[core]\nproject = gclouds-project\n[compute]\nregion = us-west1\n")
        self.env = {
            "XDG_CONFIG_HOME": str(folder / "settings"),
            "CLOUDSDK_CONFIG": str(folder / "gcloud"),
            "CLOUDSDK_CORE_PROJECT": "",
        }
        self.spec(BARE)

    def spec(self, text: str) -> None:
        (self.specs / "job.yaml").write_text(text)

    def beside(self, text: str) -> None:
        (self.specs / "launch.yaml").write_text(text)

    def launch(self, *argv: str, code: int = 0, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
        ran = launch(*argv, env={**self.env, **(env or {})}, cwd=cwd or self.specs)
        assert ran.code == code, ran.shown
        return ran

    def plan(self, *flags: str, target: str = "vertex", env: Mapping[str, str] | None = None) -> dict[str, Any]:
        ran = self.launch(target, "job.yaml", *flags, "--dry-run", "-o", "json", env=env)
        found: dict[str, Any] = json.loads(ran.out)
        return found

    def config(self, *argv: str, env: Mapping[str, str] | None = None) -> dict[str, tuple[Any, str]]:
        found = json.loads(self.launch("config", *argv, "-o", "json", env=env).out)
        return {one["name"]: (one["value"], one["origin"]) for one in found["settings"]}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def regions(plan: dict[str, Any]) -> list[str]:
    return [one["region"] for one in plan["attempts"]]


# --- What a plan takes from them -------------------------------------------------------------------------------------


def test_without_settings_gcloud_decides(world: World) -> None:
    plan = world.plan()
    assert (plan["project"], {*regions(plan)}) == ("gclouds-project", {"us-west1"})
    assert plan["run_folder"].startswith("gs://gclouds-project-launch/runs/")


def test_the_users_settings_are_before_gclouds(world: World) -> None:
    world.user.write_text(USER)
    plan = world.plan()
    assert (plan["project"], {*regions(plan)}) == ("users-project", {"us-east4"})
    assert plan["run_folder"].startswith("gs://users-bucket/runs/")
    assert plan["image"]["uri"].startswith("europe-docker.pkg.dev/users-project/images/")
    labels = plan["attempts"][0]["request"]["labels"]
    assert (labels["team"], labels["owner"]) == ("vision", "ada")
    assert plan["spec"]["regions"] == ["us-east4"], "a stored plan says what applied"


def test_launch_yaml_is_before_the_users(world: World) -> None:
    world.user.write_text(USER)
    world.beside("project: {id: teams-project}\nregions: any\noutput: gs://teams-bucket/runs\nlabels: {team: audio}\n")
    plan = world.plan()
    assert plan["project"] == "teams-project"
    assert len(regions(plan)) > 5
    assert plan["run_folder"].startswith("gs://teams-bucket/runs/")
    labels = plan["attempts"][0]["request"]["labels"]
    assert (labels["team"], labels["owner"]) == ("audio", "ada"), "labels are merged"


def test_the_spec_and_flags_are_before_files(world: World) -> None:
    world.user.write_text(USER)
    world.beside("labels: {team: audio, own: no}\n")
    world.spec(f"{BARE}regions: [us-central1]\noutput: gs://specs-bucket/runs\nlabels: {{team: speech}}\n")
    plan = world.plan()
    assert {*regions(plan)} == {"us-central1"}
    assert plan["run_folder"].startswith("gs://specs-bucket/runs/")
    assert plan["attempts"][0]["request"]["labels"]["team"] == "speech"
    assert plan["attempts"][0]["request"]["labels"]["own"] == "no", "text, as in a spec"
    flags = ("--region", "europe-west4", "--output", "gs://flags-bucket/runs", "--set", "labels.team=flags")
    plan = world.plan(*flags)
    assert {*regions(plan)} == {"europe-west4"}
    assert plan["run_folder"].startswith("gs://flags-bucket/runs/")
    assert plan["attempts"][0]["request"]["labels"]["team"] == "flags"


def test_the_variable_of_a_shell_is_before_files(world: World) -> None:
    """There is no flag for the project; selftest and the errors' hints use the variable."""
    world.user.write_text(USER)
    world.beside("project: {id: teams-project}\n")
    assert world.plan(env={"CLOUDSDK_CORE_PROJECT": "shells-project"})["project"] == "shells-project"


def test_settings_that_do_not_fit_the_spec_stay_out(world: World) -> None:
    world.user.write_text(USER)
    world.spec(f"{BARE}zones: [us-central1-a]\n")
    assert {*regions(world.plan("--run", target="vm"))} == {"us-central1"}, "the regions of its zones"
    reservation = "reservation:projects/p/zones/us-west4-a/reservations/r"
    world.spec(f"{BARE}provisioning: [{reservation}]\n")
    assert {*regions(world.plan())} == {"us-west4"}
    image = f"us-docker.pkg.dev/p/r/i@sha256:{'a' * 64}"
    world.spec(f"{BARE}image: {{uri: {image}}}\n")
    assert world.plan()["image"]["uri"] == image
    assert world.plan("--image", image)["image"]["uri"] == image


def test_a_vm_to_work_on_has_no_output(world: World) -> None:
    world.user.write_text(USER)
    for ran in (world.launch("vm", "job.yaml", "--name", "dev", more) for more in ("--dry-run", "--explain")):
        assert "output" not in ran.out


def test_a_local_run_takes_none(world: World) -> None:
    before = world.plan(target="local")
    world.user.write_text(USER)
    world.beside("output: gs://teams-bucket/runs\nproject: {max_usd_per_run: 1}\n")
    after = world.plan(target="local")
    assert after == before


def test_the_built_in_job_has_the_users_settings(world: World) -> None:
    world.user.write_text(USER)
    plan = json.loads(world.launch("vertex", "--type", "l4", "--hours", "1", "--dry-run", "-o", "json").out)
    assert (plan["project"], plan["attempts"][0]["request"]["labels"]["team"]) == ("users-project", "vision")


def test_commands_without_a_spec_have_the_users_project(world: World) -> None:
    from launcher.inputs.gather import project

    world.user.write_text(USER)
    environ = {**WORLD, **world.env}
    assert project("vertex", environ) == "users-project"
    assert project("vertex", {**environ, "CLOUDSDK_CORE_PROJECT": "shells-project"}) == "shells-project"


def test_an_image_is_built_in_the_settings_project(world: World) -> None:
    """Cloud Build runs there, also where the repository is named and a run's project is not needed."""
    from launcher.inputs.gather import GatherOptions, gather
    from tests.command import as_process

    world.user.write_text(USER)
    with as_process(["launch"], {**WORLD, **world.env, "CLOUDSDK_CORE_PROJECT": ""}, world.specs):
        assert (
            gather("vertex", Path("job.yaml"), options=GatherOptions(image_only=True)).context.project
            == "users-project"
        )


def test_settings_in_a_folder_that_cannot_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HOME=/root for another user; root itself may read everything, so the refusal is made here."""
    real = os.stat

    def refused(path: Any, *args: Any, **names: Any) -> os.stat_result:
        if str(path) == str(world.user):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **names)

    world.user.write_text(USER)
    monkeypatch.setattr(os, "stat", refused)
    assert world.plan()["project"] == "gclouds-project"


def test_a_resume_searches_the_project_of_its_spec(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resume RUN SPEC` looks the run up before it plans the spec."""
    from launcher.inputs.gather import project_of

    world.user.write_text(USER)
    for name, value in world.env.items():
        monkeypatch.setenv(name, value)
    assert project_of(None, "vertex") == project_of(world.specs / "job.yaml", "vertex") == "users-project"
    world.beside("project: {id: teams-project}\n")
    assert project_of(None, "vertex") == "users-project"
    assert project_of(world.specs / "job.yaml", "vertex") == "teams-project"


def test_the_python_api_has_them_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.beside("output: gs://teams-bucket/runs\n")
    world.user.write_text(USER)
    for name, value in world.env.items():
        monkeypatch.setenv(name, value)
    fields = {"name": "job", "machine": {"type": "l4"}, "limits": {"hours": 2}}
    plans = (api.plan(world.specs / "job.yaml"), api.plan(fields, folder=world.specs), api.plan(fields))
    assert [str(one.folder).split("/")[2] for one in plans] == ["teams-bucket", "teams-bucket", "users-bucket"]
    assert {one.project for one in plans} == {"users-project"}


def test_check_has_them_too(world: World) -> None:
    world.beside("regions: [us-central1]\nproject:\n  max_usd_per_run: 1\n")
    world.user.write_text("regions: [nowhere]\n")
    (found,) = json.loads(world.launch("check", "-o", "json", code=2).out)["specs"]
    assert found["problems"][0]["file"] == str(world.user)
    world.user.unlink()
    (found,) = json.loads(world.launch("check", "-o", "json", code=2).out)["specs"]
    assert [(one["file"], one["line"]) for one in found["problems"]] == [("launch.yaml", 3)]


# --- Identity --------------------------------------------------------------------------------------------------------


def test_where_nothing_is_set_the_run_id_stays(world: World) -> None:
    before = world.plan()
    world.user.write_text("")
    world.beside("# nothing yet\n")
    assert world.plan() == before
    world.user.write_text("labels: {team: vision}\nregions: [us-west1]\nproject: {max_usd_per_run: 500}\n")
    assert world.plan()["run"] == before["run"], "labels, regions and caps are no part of it"


def test_a_setting_means_what_it_means_in_the_spec(world: World) -> None:
    world.user.write_text(USER)
    by_file = world.plan()
    world.user.write_text("project: {id: users-project}\n")
    world.spec(BARE + "\n".join(line for line in USER.splitlines()[1:]))
    assert world.plan()["run"] == by_file["run"]


# --- Caps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("users", "teams", "where"), [(1, 500, "config.yaml:1"), (500, 1, "launch.yaml:1")])
def test_the_lowest_cap_wins(world: World, users: int, teams: int, where: str) -> None:
    world.user.write_text(f"project: {{max_usd_per_run: {users}}}\n")
    world.beside(f"project: {{max_usd_per_run: {teams}}}\n")
    ran = world.launch("vertex", "job.yaml", "--dry-run", code=2)
    assert (f"{where}: " in ran.err, ran.err.count("this run could cost")) == (True, 1)
    assert world.config("job.yaml")["project.max_usd_per_run"][0] == 1
    assert world.config("job.yaml")["project.max_usd_per_run"][1].endswith(where)


@pytest.mark.parametrize(
    ("users", "usd", "shown"), [(90, 99, "cost limit $80.00 (launch.yaml:1)"), (90, 70, "cost limit $70.00")]
)
def test_the_page_shows_the_lowest_cap_and_its_file(world: World, users: int, usd: int, shown: str) -> None:
    world.user.write_text(f"project: {{max_usd_per_run: {users}}}\n")
    world.beside("project: {max_usd_per_run: 80}\n")
    page = " ".join(world.launch("vertex", "job.yaml", "--usd", str(usd), "--dry-run").out.split())
    assert shown in page
    assert "no cost limit" not in " ".join(world.launch("vertex", "job.yaml", "--dry-run").out.split())


def test_the_users_caps_apply_without_a_spec_file(world: World) -> None:
    world.user.write_text("project: {max_usd_per_run: 1}\n")
    assert f"{world.user}:1: " in world.launch("vertex", "--dry-run", code=2).err


def test_the_owner_label_of_the_nearest_file(world: World) -> None:
    def label() -> str:
        value: str = world.plan()["attempts"][0]["request"]["labels"].get(OWNER_LABEL, "")
        return value

    account = WORLD["CLOUDSDK_CORE_ACCOUNT"]
    assert label() == owner_value(account, "hashed")
    world.user.write_text("project: {owner_label: plain}\n")
    assert label() == owner_value(account, "plain")
    world.beside("project: {owner_label: hashed}\n")
    assert label() == owner_value(account, "hashed")


# --- Where they are read, and their errors ---------------------------------------------------------------------------


def test_a_file_in_the_current_folder_is_never_read(world: World) -> None:
    folder = world.specs.parent
    for name in ("launch.yaml", "config.yaml", "launch/config.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("labels: {team: wrong}\n")
    before = world.plan()
    line = ("vertex", "specs/job.yaml", "--dry-run", "-o", "json")
    assert json.loads(world.launch(*line, cwd=folder).out) == before
    ran = world.launch(*line, cwd=folder, env={"XDG_CONFIG_HOME": ".", "HOME": str(folder / "nobody")})
    assert json.loads(ran.out) == before, "a relative XDG_CONFIG_HOME is ignored"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("regions: [us-central1]\nregionz: any\n", 2, "regions"),
        ("identity:\n  service_account: a@b.iam.gserviceaccount.com\n", 1, "identity"),
        ("output: runs\n", 1, "gs://"),
        ("project:\n  id: ''\n", 2, "project.id"),
        ("labels: {Team: a}\n", 1, "Team"),
        ("labels: {launch-run: a}\n", 1, "launch-run"),
        ("regions: [us-central1, us-central1]\n", 1, "us-central1"),
        ("regions: [us-central9]\n", 1, "us-central9"),
        ("project: my-project\n", 1, "project"),
        ("project:\n  regions: [us-central1]\n  max_usd_per_runn: 5\n", 3, "max_usd_per_run?"),
        ("- 1\n", 1, ""),
    ],
)
@pytest.mark.parametrize("which", ["user", "beside"])
def test_errors_have_their_line(world: World, which: str, text: str, line: int, words: str) -> None:
    (world.user if which == "user" else world.specs / "launch.yaml").write_text(text)
    source = str(world.user) if which == "user" else "launch.yaml"
    ran = world.launch("vertex", "job.yaml", "--dry-run", code=2)
    assert f"{source}:{line}: " in ran.err
    assert words in ran.err
    assert ran.out == ""


def test_where_the_users_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    below = Path("launch", "config.yaml")
    assert user_settings_path({}) == tmp_path / ".config" / below
    assert user_settings_path({"XDG_CONFIG_HOME": "relative"}) == tmp_path / ".config" / below
    assert user_settings_path({"XDG_CONFIG_HOME": "/etc/xdg"}) == Path("/etc/xdg") / below
    monkeypatch.setattr(sys, "platform", "win32")
    assert user_settings_path({"APPDATA": "/users/me", "XDG_CONFIG_HOME": "/etc/xdg"}) == Path("/users/me") / below


def test_no_home_folder_is_no_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    world.plan(env={"HOME": "", "XDG_CONFIG_HOME": ""})


def test_the_tests_do_not_read_the_developers_file() -> None:
    for environ in (WORLD, os.environ):
        path = user_settings_path(environ)
        assert path is not None
        assert not path.exists()


# --- What is shown ---------------------------------------------------------------------------------------------------


def test_config_names_each_origin(world: World) -> None:
    world.user.write_text(USER)
    world.beside("project:\n  id: teams-project\nlabels: {team: audio}\n")
    world.spec(f"{BARE}output: gs://specs-bucket/runs\n")
    assert world.config("job.yaml") == {
        "project": ("teams-project", "launch.yaml:2"),
        "regions": (["us-east4"], f"{world.user}:2"),
        "image.repository": ("europe-docker.pkg.dev/users-project/images", f"{world.user}:4"),
        "output": ("gs://specs-bucket/runs", "job.yaml:5"),
        "labels.team": ("audio", "launch.yaml:3"),
        "labels.owner": ("ada", f"{world.user}:6"),
        "limits.usd": (None, "not set"),
        "project.max_usd_per_run": (50, f"{world.user}:1"),
    }
    text = world.launch("config", "job.yaml").out
    assert [word in text for word in ("teams-project", "launch.yaml:2", str(world.user))] == [True] * 3


def test_config_without_files(world: World) -> None:
    found = world.config("job.yaml")
    assert found["project"] == ("gclouds-project", "gcloud")
    assert found["regions"] == (["us-west1"], "gcloud")
    assert found["output"] == ("gs://gclouds-project-launch/runs", "default")
    shell = {"CLOUDSDK_CORE_PROJECT": "shells-project"}
    assert world.config("job.yaml", env=shell)["project"] == ("shells-project", "CLOUDSDK_CORE_PROJECT")
    nothing = {"CLOUDSDK_CONFIG": "/nonexistent"}
    assert world.config("job.yaml", env=nothing)["project"] == (None, "not set")


def test_the_plan_page_names_the_origin_of_what_is_not_the_specs_own(world: World) -> None:
    page = world.launch("vertex", "job.yaml", "--dry-run").out
    assert "settings" not in page
    world.user.write_text("project: {id: users-project}\noutput: gs://users-bucket/runs\n")
    world.beside("labels: {team: audio}\n")
    for line in (("vertex", "job.yaml"), ("vm", "job.yaml", "--run", "--region", "us-central1")):
        page = world.launch(*line, "--dry-run").out
        shown = page.partition("\nsettings")[2].partition("\n\n")[0]
        assert [word in shown for word in ("project: ", "output: ", "labels.team: launch.yaml:1")] == [True] * 3
    page = world.launch("vertex", "job.yaml", "--dry-run", env={"CLOUDSDK_CORE_PROJECT": "shells-project"}).out
    assert "project: " not in page.partition("\nsettings")[2].partition("\n\n")[0]

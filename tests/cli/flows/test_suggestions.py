"""Every command that launch suggests works when it is typed."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import fields
from tests.cli.cloudjobs import FAILED, RUNS, WELL, Job
from tests.command import ROOT, Ran, launch

NO_PROJECT = {"CLOUDSDK_CORE_PROJECT": ""}
SCRIPT = "from launch_train import metrics\nmetrics.log(1, loss=0.5)\n"
OWN = "name: mine\nmachine: {type: l4%s}\nrun: {script: mine.py, launcher: python}\n"
COMMAND = re.compile(r"^(?:launch: )? *((?:\w+=\S+ )?(?:\S*/)?(?:launch|tensorboard) [a-z-].*)$")


def suggested(ran: Ran) -> list[str]:
    """The commands in what was printed: a line that begins with one, up to the words about it."""
    lines = (match[1] for line in ran.shown.splitlines() if (match := COMMAND.match(line)))
    return [re.split(r"; | {2,}# | (?:has all|goes on|resumes|continues|lists all|shows) ", line)[0] for line in lines]


def typed(command: str, folder: Path, env: Mapping[str, str]) -> Ran | None:
    """Run a suggested command as a shell would; None for TensorBoard, which must exist with the folder it reads."""
    words = shlex.split(command)
    more = dict([words.pop(0).split("=", 1)]) if "=" in words[0] else {}
    if words[0].endswith("tensorboard"):
        assert shutil.which(words[0]) or (folder / words[0]).exists(), command
        assert (folder / words[-1]).is_dir(), command
        return None
    return launch(*words[1:], env={**env, **more}, cwd=folder)


def assert_they_work(ran: Ran, folder: Path, env: Mapping[str, str], least: int = 1, *, dry: bool = False) -> list[str]:
    """Run each suggested command; with `dry`, those that start processes only as a dry run."""
    found = suggested(ran)
    assert len(found) >= least, ran.shown
    for command in found:
        done = typed(f"{command} --dry-run" if dry and " local " in command else command, folder, env)
        assert done is None or done.code == 0, f"{command}\n{done.shown}"
    return found


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "my job.yaml").write_text(OWN % "")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--gpus", "2", "--spot", "--region", "us-east4", "--set", "env.A=x y"),
        ("--output", "out here", "--run-id", "by-hand", "--type", "t4", "--name", "other"),
    ],
)
def test_after_a_local_run_without_a_cloud(own: Path, flags: tuple[str, ...]) -> None:
    ran = launch("local", "my job.yaml", *flags, cwd=own, env=NO_PROJECT)
    assert ran.code == 0, ran.shown
    found = assert_they_work(ran, own, NO_PROJECT, least=2, dry=bool(flags))
    assert [one for one in found if " init" in one] == []
    assert any(" vertex " in one for one in found)
    assert any("--nodes 2" in one for one in found)


@pytest.mark.slow
def test_an_invalid_plan_is_not_suggested(own: Path) -> None:
    (own / "my job.yaml").write_text(OWN % ", gpus: 3")  # three L4s exist nowhere; this machine takes any number
    found = suggested(launch("local", "my job.yaml", cwd=own))
    assert [one for one in found if " vertex " in one] == []
    assert any("--nodes 2" in one for one in found)
    again = assert_they_work(launch("local", "my job.yaml", "--nodes", "2", cwd=own), own, {}, least=0)
    assert [one for one in again if "--nodes" in one] == []


@pytest.mark.slow
def test_without_a_spec_init_is_suggested(tmp_path: Path) -> None:
    small = [f"--set=run.config.{one}" for one in ("steps=1", "batch_size=2", "model.n_layer=1", "eval.every=0")]
    ran = launch("local", *small, cwd=tmp_path, env={**NO_PROJECT, "OMP_NUM_THREADS": "1"})
    assert ran.code == 0, ran.shown
    (offered,) = (one for one in suggested(ran) if one.endswith(" init"))
    assert launch(*shlex.split(offered)[1:], cwd=tmp_path).code == 0
    again = launch("local", *small, cwd=tmp_path)
    assert [one for one in suggested(again) if one.endswith(" init")] == []


@pytest.mark.parametrize("env", [NO_PROJECT, {}])
def test_after_init(tmp_path: Path, env: dict[str, str]) -> None:
    found = suggested(launch("init", "my job.yaml", cwd=tmp_path, env=env))
    assert len(found) == 2
    for command in found:
        done = typed(command if "--dry-run" in command else f"{command} --dry-run", tmp_path, env)
        assert done is not None
        assert done.code == 0, f"{command}\n{done.shown}"


def test_after_a_detached_job(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    found = suggested(job.launch("vertex", "job.yaml", "--detach"))
    assert [one.split()[1] for one in found] == ["follow", "cancel"]
    for command in reversed(found):  # cancelled first, so that following it ends
        job.launch(*shlex.split(command)[1:], code=0 if "cancel" in command else 3)


def test_after_a_job_that_failed(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    ran = job.launch("vertex", "job.yaml", code=3)
    job.cloud.jobs.script = WELL
    found = assert_they_work(ran, job.folder, job.env, least=2)
    assert {one.split()[1] for one in found} == {"logs", "vertex"}


def set_in_messages() -> Iterator[tuple[Path, str]]:
    """Each `--set FIELD=` in a string of launch's code, with its file."""
    for file in sorted((ROOT / "launcher").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((file, name) for name in re.findall(r"--set ([a-z_]+(?:\.[a-z_]+)*)=", node.value))


@pytest.mark.slow
def test_set_in_messages_names_fields_of_a_spec() -> None:
    known = {path for path, _, _ in fields.fields()}
    named = list(set_in_messages())
    assert len(named) > 20
    wrong = [(file.name, name) for file, name in named if name not in known and not name.startswith("run.config.")]
    assert wrong == []

"""What is gathered around a spec: which files are code, where paths lead, and that the script is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch_train import runfolder
from launcher.errors import UsageError
from launcher.inputs.gather import folder_of, full_path
from tests.command import ROOT, WORLD, launch

SCRIPT = "name: a\nmachine: {type: l4}\nregions: any\nrun: {script: mine.py}\n"


def project(folder: Path, text: str = SCRIPT) -> Path:
    """A folder with a script and a spec that runs it; the spec is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text("print(1)\n")
    spec = folder / "job.yaml"
    spec.write_text(text)
    return spec


def rehearsed(output: Path, run: str = "a-1") -> None:
    """What a rehearsal leaves in its output."""
    (output / run / "attempts").mkdir(parents=True)
    (output / run / runfolder.PLAN).write_text("{}")
    (output / run / runfolder.attempt_lock(1)).write_text("{}")
    (output / run / "other.py").write_text("print(2)\n")


def plan(target: str, spec: Path, *flags: str | Path, cwd: Path = ROOT) -> str:
    ran = launch(target, spec, "--dry-run", "-o", "json", *flags, cwd=cwd)
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    return f"{made['run']} {made['image']['uri']}"


def refused(*argv: str | Path, cwd: Path = ROOT) -> str:
    ran = launch(*argv, "--dry-run", cwd=cwd)
    assert (ran.code, ran.out) == (2, "")
    return ran.err


@pytest.mark.parametrize("output", ["runs", "elsewhere/x", "."])
@pytest.mark.parametrize("target", ["vertex", "vm", "local"])
def test_a_rehearsal_does_not_change_the_plan(tmp_path: Path, target: str, output: str) -> None:
    spec = project(tmp_path)
    flags: tuple[str | Path, ...] = {"vm": ("--run",), "local": ("--output", tmp_path / output)}.get(target, ())
    before = plan(target, spec, *flags, cwd=tmp_path)
    rehearsed(tmp_path / output)
    assert plan(target, spec, *flags, cwd=tmp_path) == before
    assert plan(target, spec, *flags, cwd=ROOT) == before


@pytest.mark.parametrize("target", ["vertex", "vm"])
def test_the_plan_does_not_depend_on_the_current_folder(tmp_path: Path, target: str) -> None:
    spec = project(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "data.py").write_text("a folder of the user's, with a name like the default output's\n")
    flags = ("--run",) if target == "vm" else ()
    assert plan(target, spec, *flags, cwd=tmp_path) == plan(target, spec, *flags, cwd=ROOT)


def test_a_symlinked_spec_is_not_code(tmp_path: Path) -> None:
    spec = project(tmp_path / "code")
    text = spec.read_text()
    (tmp_path / "specs").mkdir()
    spec.rename(tmp_path / "specs" / "job.yaml")
    spec.symlink_to(tmp_path / "specs" / "job.yaml")
    (tmp_path / "way").symlink_to(tmp_path / "code")
    before = plan("vertex", spec)
    (tmp_path / "specs" / "job.yaml").write_text(text + "limits: {hours: 3}\n")
    assert plan("vertex", spec) == before
    assert plan("vertex", tmp_path / "way" / "job.yaml") == before


@pytest.mark.parametrize("target", [("vertex",), ("local",), ("vm", "--run")])
def test_a_missing_script_is_refused(tmp_path: Path, target: tuple[str, ...]) -> None:
    spec = project(tmp_path, SCRIPT.replace("mine.py", "mien.py"))
    err = refused(*target, spec)
    assert f"run.script: mien.py not found in the code in {tmp_path}" in err
    assert "Did you mean mine.py?" in err


@pytest.mark.parametrize(
    ("script", "hint"),
    [
        ("src/mine.py", "Did you mean mine.py?"),
        ("left/out.py", "excludes it"),
        ("venv/x.py", "excludes it"),
        ("../mine.py", "Did you mean mine.py?"),
        ("/etc/passwd", "relative to image.code"),
        ("x" * 300, "relative to image.code"),
        ("left", "relative to image.code"),
    ],
)
def test_a_script_outside_the_code_is_refused(tmp_path: Path, script: str, hint: str) -> None:
    spec = project(tmp_path, SCRIPT.replace("mine.py", script))
    for name in ("left/out.py", "venv/x.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("left/\n")
    assert hint in refused("vertex", spec)


def test_a_script_may_be_written_with_a_dot(tmp_path: Path) -> None:
    plan("vertex", project(tmp_path, SCRIPT.replace("mine.py", "./mine.py")))


def test_a_custom_image_brings_its_script(tmp_path: Path) -> None:
    spec = project(tmp_path, SCRIPT.replace("mine.py", "/app/there.py"))
    plan("vertex", spec, "--image", "us-docker.pkg.dev/p/r/i@sha256:" + "a" * 64)


def test_a_spec_from_stdin_has_no_folder(tmp_path: Path) -> None:
    spec = project(tmp_path)
    command = [sys.executable, "-m", "launcher", "vertex", "/dev/stdin", "--dry-run"]
    for source in (SCRIPT.encode(), spec):  # a pipe, and a file that stands behind /dev/stdin
        for more, code, words in (
            ([], 2, "was not read from a file"),
            (["--set", "image.code=."], 2, "image.code: . is relative to the spec's folder"),
            (["--set", f"image.code={tmp_path}"], 0, ""),
        ):
            ran = piped([*command, *more], source)
            assert (ran.returncode, words in ran.stderr.decode()) == (code, True), ran.stderr


def piped(command: list[str], source: bytes | Path) -> subprocess.CompletedProcess[bytes]:
    """The command, with bytes or an open file as its stdin."""
    if isinstance(source, bytes):
        return subprocess.run(command, input=source, env=WORLD, cwd=ROOT, capture_output=True, check=False, timeout=60)
    with source.open("rb") as file:
        return subprocess.run(command, stdin=file, env=WORLD, cwd=ROOT, capture_output=True, check=False, timeout=60)


def test_the_folder_of_a_spec(tmp_path: Path) -> None:
    spec = project(tmp_path)
    assert folder_of(spec) == tmp_path
    for path in ("/dev/null", "/dev/stdin", "/proc/self/fd/0"):
        assert folder_of(Path(path)) is None


def test_a_script_needs_a_spec_file(tmp_path: Path) -> None:
    project(tmp_path)
    assert "was not read from a file" in refused("vertex", "--set", "run={script: mine.py}", cwd=tmp_path)


def test_a_symlink_loop_as_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    spec = project(tmp_path, SCRIPT + "image: {code: round}\n")
    assert "is not a folder" in refused("vertex", spec)


@pytest.mark.parametrize("output", ["~nosuch/x", "a\udcff"])
def test_an_invalid_output_is_refused(output: str) -> None:
    with pytest.raises(UsageError):
        full_path(output)
    assert "Traceback" not in refused("local", "--output", output)


def test_a_missing_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    env = {"HOME": "", "CLOUDSDK_CONFIG": "", "CLOUDSDK_CORE_ACCOUNT": ""}
    assert launch("vertex", "--type", "l4", "--dry-run", env=env, cwd=tmp_path).code == 0
    assert "home" in launch("local", "--output", "~/x", "--dry-run", env=env, cwd=tmp_path).err


def test_settings_of_programs_are_not_for_the_trainer(tmp_path: Path) -> None:
    spec = project(tmp_path, "name: a\nmachine: {type: l4}\nrun: {module: launch_train, hang_after: 60}\n")
    assert "run.hang_after" in refused("local", "--dry-run", spec, cwd=tmp_path)
    own = "name: a\nmachine: {type: l4}\nrun: {module: launch_train, metrics: {tensorboard: tb}}\n"
    assert "run.metrics" in refused("local", "--dry-run", project(tmp_path, own), cwd=tmp_path)


def test_settings_of_the_trainer_are_not_for_a_users_module_train(tmp_path: Path) -> None:
    spec = project(tmp_path, "name: a\nmachine: {type: l4}\nrun: {module: train, config: {steps: 3}}\n")
    (tmp_path / "train.py").write_text("")
    assert "run.config" in refused("local", "--dry-run", spec, cwd=tmp_path)

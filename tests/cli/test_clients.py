"""Dry runs, `init` and `schema` on Windows: what can be checked of that on Linux (docs/clients.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

from launcher.cli.flows.suggestions import PROJECT, in_project
from launcher.inputs import code_files, content, gather, gcloud_config
from tests.clients import MODULES, missing
from tests.command import ROOT, SPECS, WORLD, launch

PLANS = (
    ("vertex", str(SPECS / "vertex-2xh100.yaml")),
    ("vertex", str(SPECS / "own-python.yaml")),
    ("vertex", "--type", "l4", "--gpus", "2", "--region", "us-central1", "--usd", "100"),
    ("vm", str(SPECS / "vm-dlvm-ssh.yaml")),
    ("vm", str(SPECS / "vm-train-spot.yaml"), "--run"),
    ("local", str(SPECS / "quickstart.yaml"), "--gpus", "2"),
    ("sweep", str(SPECS / "quickstart.yaml"), "--to", "local", "--set", "run.config.steps=1,2"),
)
OTHERS = (
    ("schema",),
    ("gpus", "--region", "us-central1"),
    ("prices",),
    ("check", "job_specs"),
    ("config",),
    ("estimate", "--vram", "24GB"),
    ("estimate", str(SPECS / "vertex-2xh100.yaml")),
    ("--help",),
    ("vertex", "--help"),
    ("vm", "--help"),
    ("local", "--help"),
    ("ssh", "--help"),
    ("status", "--help"),
    ("vm", "list", "--help"),
    ("vertex", "no-such.yaml", "--dry-run"),
    ("vertex", "--set", "run.config.stepz=1", "--dry-run"),
)


def as_windows(*lines: tuple[str, ...], **env: str) -> list[list[Any]]:
    """Run command lines without what Windows lacks; every file is opened with its encoding named."""
    strict = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")
    command = [sys.executable, *strict, "-c", "from tests.clients import main; main()"]
    done = subprocess.run(
        command,
        input=json.dumps({"lines": lines, "env": env}),
        cwd=ROOT,
        env=WORLD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[Any]] = json.loads(done.stdout)
    return answers


def own_code(folder: Path, *, in_git: bool) -> Path:
    """A spec with a script, a package and a link."""
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "model.py").write_text("layers = 2\n")
    (folder / "parts" / "run.sh").write_text("true\n")
    (folder / "parts" / "run.sh").chmod(0o755)
    (folder / "train.py").write_text("import parts.model\nopen('data/é.txt')\n", encoding="utf-8")
    (folder / "link.py").symlink_to("parts/model.py")
    (folder / ".gitignore").write_text("data/\n")
    (folder / "requirements.txt").write_text("einops\n")
    spec = folder / "job.yaml"
    spec.write_text("name: a\nregions: any\nmachine: {type: l4}\nimage: {requirements: requirements.txt}\n")
    if in_git:
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return spec


@pytest.mark.slow
def test_the_same_output_without_what_windows_lacks(tmp_path: Path) -> None:
    own = [("vertex", str(own_code(tmp_path / name, in_git=name == "git"))) for name in ("git", "plain")]
    lines = [(*line, "--dry-run", "-o", output) for line in (*PLANS, *own) for output in ("text", "json", "yaml")]
    lines += OTHERS
    seen = [list(launch(*line)) for line in lines]
    assert {code for code, _, _ in seen} == {0, 2}
    assert as_windows(*lines) == seen


def test_init_writes_the_same_file_without_what_windows_lacks(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    expected = list(launch("init", spec)), spec.read_bytes()
    spec.unlink()
    (seen,) = as_windows(("init", str(spec)))
    assert (seen, spec.read_bytes()) == expected


def test_a_user_without_a_name(tmp_path: Path) -> None:
    line = ("vertex", "--type", "l4", "--region", "us-central1", "--dry-run", "-o", "json")
    ((code, out, err),) = as_windows(line, CLOUDSDK_CORE_ACCOUNT="", HOME=str(tmp_path))
    assert (code, err) == (0, "")
    assert json.loads(out)["attempts"]


def test_the_mask_removes_what_windows_lacks() -> None:
    assert {"getuid", "fork", "geteuid", "killpg", "O_NOFOLLOW", "copy_file_range"} <= missing("os")
    assert not {"open", "fstat", "readlink", "getpid", "kill"} & missing("os")
    assert {"SIGKILL", "SIGHUP"} <= missing("signal")
    assert "SIGINT" not in missing("signal")
    assert {"fcntl", "pwd", "grp", "termios", "resource"} <= {*MODULES}


# --- Paths and content ------------------------------------------------------------------------------------------------


def test_files_are_hashed_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows os.open translates newlines unless O_BINARY is given."""
    binary, flags, real = 1 << 28, list[int](), os.open

    def opened(path: Path, flag: int) -> int:
        flags.append(flag)
        return real(path, flag & ~binary)

    monkeypatch.setattr(os, "O_BINARY", binary, raising=False)
    monkeypatch.setattr(os, "open", opened)
    (tmp_path / "a.py").write_bytes(b"1\r\n")
    assert content.hashed(tmp_path / "a.py")[2] == 3
    assert [flag & binary for flag in flags] == [binary]


def test_the_recipe_and_the_trainer_have_forward_slashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.walk joins with the platform's separator."""
    walk = os.walk
    expected = sorted(file.name for file in (*content.recipe(), *content.trainer()))
    content.recipe.cache_clear()
    content.trainer.cache_clear()
    monkeypatch.setattr(
        os,
        "walk",
        lambda top: ((top + at[len(top) :].replace("/", "\\"), below, names) for at, below, names in walk(top)),
    )
    assert sorted(file.name for file in (*content.recipe(), *content.trainer())) == expected
    assert "launch_train/common/storage/local.py" in expected


def test_a_links_target_has_forward_slashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "link.py").symlink_to("parts/model.py")
    expected = code_files.link_target(tmp_path, "link.py", str(tmp_path / "link.py"))
    monkeypatch.setattr(os, "readlink", lambda path, **_: "parts\\model.py")
    monkeypatch.setattr(os, "sep", "\\")
    assert code_files.link_target(tmp_path, "link.py", str(tmp_path / "link.py")) == expected == "parts/model.py"


def test_a_local_output_has_forward_slashes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Windows(PureWindowsPath):
        def expanduser(self) -> Windows:
            return self

        def resolve(self) -> Windows:
            return Windows("C:\\Users\\me") / self

    monkeypatch.setattr(gather, "Path", Windows)
    assert gather.full_path("runs\\a") == "C:/Users/me/runs/a"


def test_a_script_with_backslashes(tmp_path: Path) -> None:
    spec = own_code(tmp_path / "a", in_git=False)
    spec.write_text("name: a\nregions: any\nmachine: {type: l4}\nrun: {script: 'parts\\run.sh'}\n")
    ran = launch("vertex", spec, "--dry-run")
    assert ran.code == 2
    assert "parts/run.sh" in ran.err


def test_gclouds_folder_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gcloud" / "configurations"
    folder.mkdir(parents=True)
    (folder / "config_default").write_bytes(b"[core]\r\nproject = p1\r\n")
    monkeypatch.setattr(sys, "platform", "win32")
    assert gcloud_config.setting("core/project", {"APPDATA": str(tmp_path), "HOME": "/"}) == "p1"
    assert gcloud_config.setting("core/project", {}) is None


# --- Commands that need Linux or macOS -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        ("local",),
        ("vertex", "--type", "l4"),
        ("vm",),
        ("vm", "list"),
        ("ssh", "dev", "--", "ls", "--dry-run"),
        ("push-code", "dev", ".", "--dry-run"),
        ("status",),
    ],
    ids=" ".join,
)
def test_a_command_that_needs_posix_is_refused_on_windows(
    line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    ran = launch(*line)
    assert (ran.code, ran.out) == (2, "")
    assert f"launch {line[0]} " in ran.err
    assert "WSL" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "line",
    [
        ("vertex", "--type", "l4", "--dry-run"),
        ("schema",),
        ("gpus",),
        ("estimate",),
        ("ssh", "--help"),
        ("status", "-h"),
    ],
    ids=" ".join,
)
def test_what_works_on_windows_is_not_refused(line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "WSL" not in launch(*line).err


def test_an_unknown_command_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    ran = launch("vertx")
    assert ran.code == 2
    assert "vertex" in ran.err
    assert "WSL" not in ran.err


def test_a_suggested_command_sets_the_project_in_both_shells_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT", raising=False)
    monkeypatch.setenv("APPDATA", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "win32")
    assert in_project("launch check") == f'cmd /c "set CLOUDSDK_CORE_PROJECT={PROJECT}&& launch check"'

"""What git says about the code, through the real git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from launcher.inputs.git import commit, without_user

WHEN = "2026-01-02T03:04:05+00:00"


def git(folder: Path, *words: str) -> str:
    who = {"NAME": "me", "EMAIL": "me@example.com", "DATE": WHEN}
    env = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    isolated = {**os.environ, **env, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    ran = subprocess.run(["git", *words], cwd=folder, env=isolated, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=one")
    return tmp_path / "deep"


def test_the_commit_its_time_and_whether_the_code_differs(code: Path) -> None:
    head = git(code, "rev-parse", "HEAD")
    assert commit(code) == (head, "2026-01-02T03:04:05+00:00", "")
    (code / "a.py").write_text("2")
    assert commit(code) == (f"{head}-dirty", "2026-01-02T03:04:05+00:00", "")
    (code / "a.py").write_text("1")
    (code.parent / "b.py").write_text("elsewhere in the repository")
    git(code.parent, "add", "b.py")
    found = commit(code)
    assert found
    assert found.revision == head


def test_a_file_that_git_does_not_know_makes_it_differ(code: Path) -> None:
    (code / "caf\xe9.py").write_text("1")
    (code / "left-out.log").write_text("1")
    (code / ".gitignore").write_text("*.log\n")
    git(code, "add", "caf\xe9.py", ".gitignore")
    git(code, "commit", "--quiet", "--message=two")
    (code / "new.py").write_text("1")
    head = git(code, "rev-parse", "HEAD")
    known = ["a.py", "caf\xe9.py", ".gitignore"]
    revisions = [found.revision for names in (known, [*known, "new.py"]) if (found := commit(code, names))]
    assert revisions == [head, f"{head}-dirty"]


def test_the_address_says_no_password(code: Path) -> None:
    git(code, "remote", "add", "origin", "https://me:ghp_secret@github.com/me/code.git")
    found = commit(code)
    assert found
    assert found.source == "https://github.com/me/code.git"
    assert without_user("git@github.com:me/code.git") == "git@github.com:me/code.git"
    assert without_user("ssh://git@example.com:22/a") == "ssh://example.com:22/a"
    assert not without_user("https://me:ghp_secret@[example/a")


def test_no_program_of_the_repositorys_config_is_run(code: Path) -> None:
    ran = code.parent / "ran"
    program = code.parent / "program"
    program.write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
    program.chmod(0o755)
    (code.parent / ".gitattributes").write_text("* filter=mine\n")
    git(code, "add", "--all", ":/")
    git(code, "commit", "--quiet", "--message=two")
    head = git(code, "rev-parse", "HEAD")
    for name in ("filter.mine.clean", "filter.mine.process", "core.fsmonitor", "gpg.program", "core.pager"):
        git(code, "config", name, str(program))
    for name in ("filter.mine.required", "log.showSignature"):
        git(code, "config", name, "true")
    hook = code.parent / ".git" / "hooks" / "post-index-change"
    hook.write_text(program.read_text())
    hook.chmod(0o755)
    os.utime(code / "a.py", (1, 1))  # git has to read it again
    found = commit(code)
    assert found
    assert found.revision == head
    assert not ran.exists()


def test_a_submodule_counts(code: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "lib")
    (tmp_path / "lib" / "b.py").write_text("1")
    git(tmp_path / "lib", "add", ".")
    git(tmp_path / "lib", "commit", "--quiet", "--message=one")
    git(code, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "lib"), "lib")
    git(code, "commit", "--quiet", "--message=lib")
    head, names = git(code, "rev-parse", "HEAD"), ["a.py", "lib/b.py"]
    found = [commit(code, names), commit(code, [*names, "lib/new.py"])]
    (code / "lib" / "b.py").write_text("2")
    found.append(commit(code, names))
    assert [each.revision for each in found if each] == [head, f"{head}-dirty", f"{head}-dirty"]


def test_without_git_nothing_is_recorded(
    code: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(tmp_path_factory.mktemp("plain")) is None
    git(code.parent, "checkout", "--quiet", "--orphan", "none")
    assert commit(code) is None
    monkeypatch.setenv("PATH", "")
    assert commit(code) is None

"""Which files of a git checkout ship: those that git lists, whatever the repository's config or the user's says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.inputs import code_files
from tests.inputs.test_content import written
from tests.inputs.test_git import git


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in code_files.collect_code(folder))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "checkout")
    return written(tmp_path / "checkout", a__py="1")


def commit_all(folder: Path) -> None:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=all")


def test_git_lists_what_ships(checkout: Path) -> None:
    written(checkout / "pkg", w__ckpt="1", kept__ckpt="1", m__py="1", new__py="1", log__txt="1")
    written(checkout / "pkg" / "deep", x__ckpt="1", y__py="1")
    (checkout / "pkg" / ".gitignore").write_text("*.ckpt\n")
    (checkout / ".gitignore").write_text("/pkg/log.txt\n.gitignore\n")
    git(checkout, "add", "--force", "pkg/kept.ckpt", "pkg/m.py", "pkg/deep/y.py")
    (checkout / "pkg" / "m.py").unlink()  # listed, but gone
    assert names(checkout) == ["a.py", "pkg/deep/y.py", "pkg/kept.ckpt", "pkg/new.py"]
    assert names(checkout / "pkg") == ["deep/y.py", "kept.ckpt", "new.py"], "a folder of the checkout"


def test_the_users_own_excludes_do_not_change_what_ships(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(checkout.parent, excludes="*.py\n", home__gitconfig=f"[core]\nexcludesFile={checkout.parent}/excludes\n")
    (checkout / ".git" / "info" / "exclude").write_text("*.py\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(checkout.parent / "home.gitconfig"))
    assert names(checkout) == ["a.py"]


def test_the_repositorys_config_runs_no_program_and_names_no_other_folder(checkout: Path) -> None:
    commit_all(checkout)
    ran = checkout.parent / "ran"
    program = written(checkout.parent, program=f"#!/bin/sh\necho $0 >> {ran}\n") / "program"
    program.chmod(0o755)
    hooks = checkout / ".git" / "hooks"
    for hook in ("post-index-change", "post-checkout", "pre-commit"):
        shutil.copy(program, hooks / hook)
    included = written(checkout.parent, more=f"[core]\npager={program}\nfsmonitor={program}\nsshCommand={program}\n")
    git(checkout, "config", "include.path", str(included / "more"))
    git(checkout, "config", "core.fsmonitor", str(program))
    git(checkout, "config", "core.worktree", str(written(checkout.parent / "elsewhere", a__py="2", b__py="2")))
    assert names(checkout) == ["a.py"]
    assert not ran.exists()


def test_variables_that_lead_git_elsewhere_do_not_count(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set where launch runs in a hook, or in `git rebase --exec`."""
    git(checkout.parent, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(checkout.parent / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(checkout.parent / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(checkout.parent / "other" / "index"))
    (checkout / ".gitignore").write_text("*.log\n")
    written(checkout, b__log="1")
    assert names(checkout) == [".gitignore", "a.py"]


def test_what_never_ships_stays_out_though_git_has_it(checkout: Path) -> None:
    written(checkout / "node_modules" / "x", a__js="1")
    written(checkout / "conf", __env="A=1")
    written(checkout / "runs" / "a-1" / "attempts", **{"0001__json": "{}"})
    written(checkout / "runs" / "a-1", plan__json="{}")
    written(checkout / "data", big="1")
    (checkout / ".dockerignore").write_text("data\n")
    commit_all(checkout)
    found = code_files.without_secrets(code_files.collect_code(checkout))
    assert sorted(file.name for file in found.files) == [".dockerignore", "a.py"]
    assert found.secrets == ["conf/.env"]


def test_links_and_odd_names_ship_as_they_are(checkout: Path) -> None:
    (checkout / "link").symlink_to("a.py")
    (checkout / "folder").symlink_to(".")
    odd = "caf\xe9 \n.py"
    (checkout / odd).write_text("1")
    with open(os.fsencode(checkout) + b"/caf\xe9.py", "wb"):  # noqa: PTH123 -- bytes
        pass
    os.mkfifo(checkout / "pipe")
    commit = ["link", "a.py", odd]
    git(checkout, "add", *commit)
    found = {file.name: file.link for file in code_files.collect_code(checkout)}
    assert found == {"a.py": None, "link": "a.py", "folder": ".", odd: None, os.fsdecode(b"caf\xe9.py"): None}


def test_a_nested_repository_is_named_and_refused(checkout: Path) -> None:
    git(checkout, "init", "--quiet", "libs/other")
    written(checkout / "libs" / "other", b__py="1")
    with pytest.raises(UsageError) as refused:
        code_files.collect_code(checkout)
    assert "libs/other" in refused.value.problem
    assert ".dockerignore" in refused.value.hint
    (checkout / ".dockerignore").write_text("libs/other\n.dockerignore\n")
    assert names(checkout) == ["a.py"]


@pytest.fixture
def with_submodule(checkout: Path) -> Path:
    git(checkout.parent, "init", "--quiet", "lib")
    written(checkout.parent / "lib", b__py="1", c__log="1")
    (checkout.parent / "lib" / ".gitignore").write_text("*.log\n")
    git(checkout.parent / "lib", "add", ".")
    git(checkout.parent / "lib", "commit", "--quiet", "--message=one")
    git(
        checkout, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(checkout.parent / "lib"), "lib"
    )
    git(checkout, "commit", "--quiet", "--message=lib")
    return checkout


def test_the_files_of_a_submodule_ship(with_submodule: Path) -> None:
    written(with_submodule / "lib", new__py="1", d__log="1")
    assert names(with_submodule) == [".gitmodules", "a.py", "lib/.gitignore", "lib/b.py", "lib/new.py"]
    assert names(with_submodule / "lib") == [".gitignore", "b.py", "new.py"]


def test_a_submodule_that_is_not_checked_out_is_named_and_refused(with_submodule: Path) -> None:
    git(with_submodule, "submodule", "--quiet", "deinit", "--force", "lib")
    with pytest.raises(UsageError) as refused:
        code_files.collect_code(with_submodule)
    assert "lib" in refused.value.problem
    assert "git submodule update --init" in refused.value.hint
    (with_submodule / ".dockerignore").write_text("lib\n.*\n")
    assert names(with_submodule) == ["a.py"]
    (with_submodule / ".dockerignore").unlink()
    (with_submodule / "lib").rmdir()  # listed, but gone
    assert names(with_submodule) == [".gitmodules", "a.py"]


def test_a_file_that_became_a_folder(checkout: Path) -> None:
    commit_all(checkout)
    (checkout / "a.py").unlink()
    written(checkout / "a.py", inner__py="1")
    assert names(checkout) == ["a.py/inner.py"]


def test_a_folder_that_became_a_link_ships_as_a_link(checkout: Path) -> None:
    """What git still has below it would be read through the link, from wherever it leads."""
    written(checkout / "data", key__txt="1")
    written(checkout / "real", key__txt="2")
    commit_all(checkout)
    shutil.rmtree(checkout / "data")
    (checkout / "data").symlink_to("real")
    found = {file.name: file.link for file in code_files.collect_code(checkout)}
    assert found == {"a.py": None, "data": "real", "real/key.txt": None}
    (checkout / "data").unlink()
    (checkout / "data").symlink_to(written(checkout.parent / "elsewhere", key__txt="3"))
    with pytest.raises(UsageError, match="data is a link to"):
        code_files.collect_code(checkout)


def test_a_folder_that_the_repository_around_it_ignores(checkout: Path) -> None:
    """A home that is a repository with `*` in its .gitignore: what lies in it is no part of it."""
    (checkout / ".gitignore").write_text("*\n")
    written(checkout / "job", a__py="1", b__log="1")
    (checkout / "job" / ".gitignore").write_text("*.log\n.gitignore\n")
    assert names(checkout / "job") == ["a.py"]


@pytest.mark.parametrize("broken", ["[core\n", "[core]\nrepositoryformatversion = 99\n"])
def test_a_repository_that_git_refuses_is_refused(checkout: Path, broken: str) -> None:
    """Other files would ship than do where git can read it, under another tag."""
    (checkout / ".git" / "config").write_text(broken)
    with pytest.raises(UsageError) as refused:
        code_files.collect_code(checkout)
    assert str(checkout) in refused.value.problem


def test_a_repository_of_somebody_else_is_refused_with_gits_own_way_out(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch for its tests
    with pytest.raises(UsageError) as refused:
        code_files.collect_code(checkout)
    assert "dubious ownership" in refused.value.problem
    assert f"git config --global --add safe.directory {checkout}" in refused.value.hint


def test_a_git_file_that_leads_nowhere_is_no_checkout(checkout: Path) -> None:
    """A worktree or a submodule that was copied to another machine, or into a container."""
    shutil.rmtree(checkout / ".git")
    (checkout / ".git").write_text("gitdir: /nowhere/at/all\n")
    written(checkout / "pkg", w__ckpt="1")
    (checkout / "pkg" / ".gitignore").write_text("*\n")
    assert names(checkout) == ["a.py"]


def test_what_git_can_not_read_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without, and its exit status is 0. (Root may read all, so git's line is printed by a stand-in.)"""
    real = shutil.which("git")
    line = "warning: could not open directory 'job/closed/': Permission denied"
    program = written(checkout.parent / "bin", git=f'#!/bin/sh\necho "{line}" >&2\nexec {real} "$@"\n') / "git"
    program.chmod(0o755)
    job = written(checkout / "job", a__py="1")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"job/closed/? can't be read: Permission denied"):
        code_files.collect_code(job)
    (job / ".dockerignore").write_text("closed\n.*\n")
    assert names(job) == ["a.py"]


def test_no_git_process_where_there_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **_: object) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(subprocess, "run", refuse)
    assert names(written(tmp_path / "plain", a__py="1")) == ["a.py"]

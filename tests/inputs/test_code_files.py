"""A folder of code: what is left out, and what can't be taken is told in words."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from launch_train import runfolder
from launcher.errors import UsageError
from launcher.inputs import code_files, content
from tests.inputs.test_content import written
from tests.inputs.test_git import git


def names(folder: Path, *without: Path) -> list[str]:
    return sorted(file.name for file in code_files.collect_code(folder, frozenset(without)))


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.py"
    with open(raw, "wb") as file:  # noqa: PTH123 -- bytes
        file.write(b"1")
    assert names(tmp_path) == [os.fsdecode(b"caf\xe9.py")]
    assert content.content(code_files.collect_code(tmp_path)).files == 1
    (tmp_path / ".gitignore").write_bytes(b"caf\xe9.py\n.gitignore\n")
    assert names(tmp_path) == []


def test_rules_in_latin_1_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    written(tmp_path, a__py="", b__log="", c__tmp="")
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbf*.log\r\n# caf\xe9\r\ncaf\xe9/\r\n")
    (tmp_path / ".dockerignore").write_bytes(b"\xef\xbb\xbf*.tmp\r\n.*ignore\n")
    assert names(tmp_path) == ["a.py"]


@pytest.mark.parametrize("line", ["!", "\\", "trailing\\", "[z-a]"])
@pytest.mark.parametrize("name", [".gitignore", ".dockerignore"])
def test_an_invalid_ignore_rule(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / name).write_text(f"*.log\n\n{line}\n")
    with pytest.raises(UsageError) as caught:
        code_files.collect_code(tmp_path)
    assert f"{tmp_path / name}:3: {line!r} " in caught.value.problem


def test_an_ignore_file_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").mkdir()
    assert names(tmp_path) == [], "as git has it"
    (tmp_path / ".dockerignore").mkdir()
    with pytest.raises(UsageError, match=r"\.dockerignore can't be read: Is a directory"):
        code_files.collect_code(tmp_path)


@pytest.mark.parametrize("name", ["missing", "a.py", "x" * 300, "x\0"])
def test_a_code_folder_that_is_not_a_folder(tmp_path: Path, name: str) -> None:
    written(tmp_path, a__py="")
    with pytest.raises(UsageError, match="is not a folder"):
        code_files.collect_code(tmp_path / name)


def test_run_folders_are_no_code_wherever_they_lie(tmp_path: Path) -> None:
    written(tmp_path, a__py="")
    for place in ("runs/a-1", "b-2", "deep/er/c-3"):
        run = written(tmp_path / place, plan__json="{}", other="")
        (run / runfolder.attempt_lock(1)).parent.mkdir()
        (run / runfolder.attempt_lock(1)).write_text("{}")
    written(tmp_path / "plans", plan__json="{}")
    written(tmp_path / "mine" / "attempts", x="")
    assert names(tmp_path) == ["a.py", "mine/attempts/x", "plans/plan.json"]


def test_files_excluded_by_their_path(tmp_path: Path) -> None:
    written(tmp_path, a__py="", spec__yaml="")
    written(tmp_path / "out" / "x", b__py="")
    assert names(tmp_path, tmp_path / "spec.yaml", tmp_path / "out") == ["a.py"]
    assert names(tmp_path, tmp_path) == names(tmp_path, tmp_path.parent) == ["a.py", "out/x/b.py", "spec.yaml"]


def test_links_inside_stay_links(tmp_path: Path) -> None:
    written(tmp_path / "deep", a__py="1")
    (tmp_path / "b.py").symlink_to("deep/a.py")
    (tmp_path / "folder").symlink_to("deep")
    (tmp_path / "deep" / "absolute").symlink_to(tmp_path / "deep" / "a.py")
    (tmp_path / "dangling").symlink_to("not-yet")
    found = {file.name: file.link for file in code_files.collect_code(tmp_path)}
    assert found == {
        "b.py": "deep/a.py",
        "folder": "deep",
        "deep/absolute": "a.py",
        "deep/a.py": None,
        "dangling": "not-yet",
    }


def test_links_that_lead_out_or_in_a_circle(tmp_path: Path) -> None:
    folder, outside = written(tmp_path / "code", a__py=""), written(tmp_path / "outside", data="1")
    inner = folder / "deep" / "er"
    inner.mkdir(parents=True)
    (inner / "up").symlink_to("../..")  # inside still
    targets = [str(outside), "../outside/data", "deep/er/up/../outside/data", "/etc/hostname", "../gone"]
    for target in targets:
        (folder / "link").symlink_to(target)
        with pytest.raises(UsageError, match=r"link is a link to .*, outside the code folder") as caught:
            code_files.collect_code(folder)
        assert target in caught.value.problem
        assert ".dockerignore" in caught.value.hint
        (folder / "link").unlink()
    (folder / "link").symlink_to("other")
    (folder / "other").symlink_to("link")
    with pytest.raises(UsageError, match="a symlink loop"):
        code_files.collect_code(folder)
    (folder / ".dockerignore").write_text("link\nother\n")
    assert names(folder) == [".dockerignore", "a.py", "deep/er/up"]


def test_special_files_and_what_a_mac_leaves_are_not_code(tmp_path: Path) -> None:
    os.mkfifo(written(tmp_path, a__py="", __DS_Store="1") / "pipe")
    assert names(tmp_path) == ["a.py"]


def test_code_that_is_too_large_names_the_largest_and_reads_none(tmp_path: Path) -> None:
    for number in range(7):
        with (written(tmp_path) / f"w{number}.bin").open("wb") as file:
            file.truncate((number + 1) * 400_000_000)
    found = code_files.collect_code(tmp_path)
    with pytest.raises(UsageError) as caught:
        code_files.check_size(found, 500)
    lines = caught.value.problem.splitlines()
    assert lines[0] == "the code has 11,200 MB, and image.code_limit_mb is 500; the largest files:"
    assert [line.split()[-1] for line in lines[1:]] == ["w6.bin", "w5.bin", "w4.bin", "w3.bin", "w2.bin"]
    code_files.check_size(found, 11_200)


def test_what_is_ignored_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of a million files beside the code, or a folder that only root may read."""
    written(tmp_path, a__py="1")
    written(tmp_path / "data" / "deep", x="1")
    written(tmp_path / "other", x="1")
    looked: list[str] = []
    scandir = os.scandir

    def look(path: str) -> object:
        looked.append(os.path.relpath(path, tmp_path))
        if path.endswith("data"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", look)
    with pytest.raises(UsageError, match=r"data can't be read: Permission denied") as refused:
        code_files.collect_code(tmp_path)
    assert ".dockerignore" in refused.value.hint
    looked.clear()
    (tmp_path / ".dockerignore").write_text("data/\n.*\n")
    assert names(tmp_path) == ["a.py", "other/x"]
    assert looked == [".", "other"]
    (tmp_path / ".dockerignore").write_text("data/\n.*\n!other\n")
    assert names(tmp_path) == ["a.py", "other/x"]


def test_docker_ignore_is_anchored_at_the_top(tmp_path: Path) -> None:
    written(tmp_path / "data", big="1")
    written(tmp_path / "my_pkg" / "data", loader__py="1")
    written(tmp_path / "my_pkg" / "cache", a="1")
    (tmp_path / ".dockerignore").write_text("data\n**/cache\n.*\n")
    assert names(tmp_path) == ["my_pkg/data/loader.py"]


def test_nested_git_ignores_count(tmp_path: Path) -> None:
    written(tmp_path / "my_pkg" / "deep", w__ckpt="1", kept__ckpt="1", m__py="1", __gitignore="!kept.ckpt\n")
    written(tmp_path / "my_pkg", w__ckpt="1", __gitignore="*.ckpt\n/out/\n")
    written(tmp_path / "my_pkg" / "out", a="1")
    written(tmp_path / "other" / "out", w__ckpt="1")
    (tmp_path / ".dockerignore").write_text("**/.*ignore\n")
    assert names(tmp_path) == ["my_pkg/deep/kept.ckpt", "my_pkg/deep/m.py", "other/out/w.ckpt"]


def test_without_git_the_rules_are_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random .gitignore files: what git lists, and what is found without it. (Pathspec gets lines that end with /**/
    wrong, so there are none.)"""
    chance, path = random.Random(15), os.environ["PATH"]
    parts = ["a", "b.x", "*", "*.x", "c.x", "?", "**", "[ab]", "d"]
    for number in range(40):
        monkeypatch.setenv("PATH", path)
        git(tmp_path, "init", "--quiet", str(number))
        folder = tmp_path / str(number)
        folders = [folder.joinpath(*each) for n in range(4) for each in itertools.product(["a", "b.x"], repeat=n)]
        for one in folders:
            written(one, c="1", c__x="1", d="1")
        for one in chance.sample(folders, 3):
            lines = [
                chance.choice(["", "", "!", "/", "**/"])
                + "/".join(chance.choices(parts, k=chance.choice([1, 1, 2])))
                + chance.choice(["", "", "/"])
                for _ in range(chance.randint(1, 4))
            ]
            (one / ".gitignore").write_text("\n".join(lines).replace("**/\n", "**\n").removesuffix("**/"))
        by_git = names(folder)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert names(folder) == by_git, {str(one): one.read_text() for one in folder.glob("**/.gitignore")}


def test_a_link_by_the_folders_own_name_leads_to_the_same_in_the_image(tmp_path: Path) -> None:
    folder = written(tmp_path / "code" / "deep", a__py="1").parent
    (folder / "one").symlink_to("../code/deep/a.py")
    (folder / "deep" / "two").symlink_to("../../code/deep")
    (folder / "deep" / "three").symlink_to("../deep/a.py")
    found = {file.name: file.link for file in code_files.collect_code(folder)}
    assert found == {"one": "deep/a.py", "deep/two": ".", "deep/three": "../deep/a.py", "deep/a.py": None}


def test_a_link_to_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "settings.json").symlink_to("pipe")
    assert names(tmp_path) == ["settings.json"]


def test_a_file_that_goes_away_meanwhile(tmp_path: Path) -> None:
    found = code_files.collect_code(written(tmp_path, a__py="1"))
    (tmp_path / "a.py").unlink()
    with pytest.raises(UsageError, match=r"a\.py can't be read: No such file"):
        code_files.check_size(found, 1)

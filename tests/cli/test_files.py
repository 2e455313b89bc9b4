"""A folder of code as content: what is left out, and what can't be read is told in words."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from launcher.cli import files
from launcher.errors import UsageError
from train import contract


def written(folder: Path, **texts: str) -> Path:
    """Files by name (two underscores are a dot)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def names(folder: Path, *without: Path) -> list[str]:
    return sorted(file.name for file in files.code(folder, frozenset(without)))


def test_a_file_counts_by_name_content_and_whether_it_runs(tmp_path: Path) -> None:
    def digest() -> str:
        return files.content(files.code(tmp_path)).digest

    written(tmp_path, a__py="1")
    seen = [digest()]
    os.utime(tmp_path / "a.py", (0, 0))
    assert digest() == seen[0]
    (tmp_path / "a.py").chmod(0o755)
    seen.append(digest())
    written(tmp_path, a__py="2")
    seen.append(digest())
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    seen.append(digest())
    assert len(set(seen)) == 4


def test_size_and_count_of_a_file_larger_than_any_buffer(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(300 << 20)  # a hole: no disk, but as many bytes to read
    found = files.content([files.File("big", tmp_path / "big")])
    assert (found.files, found.size) == (1, 300 << 20)
    assert files.hashed(written(tmp_path, a="text") / "a") == (hashlib.sha256(b"text").hexdigest(), 4)


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.py"
    with open(raw, "wb") as file:  # noqa: PTH123 -- bytes
        file.write(b"1")
    assert names(tmp_path) == [os.fsdecode(b"caf\xe9.py")]
    assert files.content(files.code(tmp_path)).files == 1
    (tmp_path / ".gitignore").write_bytes(b"caf\xe9.py\n.gitignore\n")
    assert names(tmp_path) == []


def test_rules_in_latin_1_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    written(tmp_path, a__py="", b__log="", c__tmp="")
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbf*.log\r\n# caf\xe9\r\ncaf\xe9/\r\n")
    (tmp_path / ".dockerignore").write_bytes(b"*.tmp\n.*ignore\n")
    assert names(tmp_path) == ["a.py"]


@pytest.mark.parametrize("line", ["!", "\\", "trailing\\", "[z-a]"])
@pytest.mark.parametrize("name", files.IGNORE_FILES)
def test_a_line_that_is_no_rule(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / name).write_text(f"*.log\n\n{line}\n")
    with pytest.raises(UsageError) as caught:
        files.code(tmp_path)
    assert f"{tmp_path / name}:3: {line!r} is no rule" in caught.value.problem


def test_an_ignore_file_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").mkdir()
    with pytest.raises(UsageError, match=r"\.gitignore can't be read: Is a directory"):
        files.code(tmp_path)


def test_a_file_that_goes_away_or_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone can't be read: No such file"):
        files.content([files.File("gone", tmp_path / "gone")])


@pytest.mark.parametrize("name", ["missing", "a.py", "x" * 300, "x\0"])
def test_code_that_is_no_folder(tmp_path: Path, name: str) -> None:
    written(tmp_path, a__py="")
    with pytest.raises(UsageError, match="isn't a folder"):
        files.code(tmp_path / name)
    if name != "a.py":
        with pytest.raises(UsageError, match="isn't a file"):
            files.requirements(tmp_path / name)


def test_run_folders_are_no_code_wherever_they_lie(tmp_path: Path) -> None:
    written(tmp_path, a__py="")
    for place in ("runs/a-1", "b-2", "deep/er/c-3"):
        run = written(tmp_path / place, plan__json="{}", other="")
        (run / contract.attempt_lock(1)).parent.mkdir()
        (run / contract.attempt_lock(1)).write_text("{}")
    written(tmp_path / "plans", plan__json="{}")
    written(tmp_path / "mine" / "attempts", x="")
    assert names(tmp_path) == ["a.py", "mine/attempts/x", "plans/plan.json"]


def test_what_is_left_out_by_its_place(tmp_path: Path) -> None:
    written(tmp_path, a__py="", spec__yaml="")
    written(tmp_path / "out" / "x", b__py="")
    assert names(tmp_path, tmp_path / "spec.yaml", tmp_path / "out") == ["a.py"]
    assert names(tmp_path, tmp_path) == names(tmp_path, tmp_path.parent) == ["a.py", "out/x/b.py", "spec.yaml"]

"""Files as content: the same digest on every machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.images.source_files import File
from launcher.inputs import code_files, content
from launcher.plan.model import Content


def written(folder: Path, **texts: str) -> Path:
    """Files by name (two underscores are a dot)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_file_counts_by_name_content_and_whether_it_runs(tmp_path: Path) -> None:
    def digest() -> str:
        return content.content(code_files.collect_code(tmp_path)).digest

    written(tmp_path, a__py="1")
    seen = [digest()]
    os.utime(tmp_path / "a.py", (0, 0))
    (tmp_path / "a.py").chmod(0o600)
    assert digest() == seen[0]
    (tmp_path / "a.py").chmod(0o755)
    seen.append(digest())
    written(tmp_path, a__py="2")
    seen.append(digest())
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    seen.append(digest())
    (tmp_path / "c").symlink_to("b.py")
    seen.append(digest())
    (tmp_path / "c").unlink()
    (tmp_path / "c").symlink_to("./b.py")
    seen.append(digest())
    assert len(set(seen)) == 6


def test_size_and_count_of_a_file_larger_than_any_buffer(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(300 << 20)  # a hole: no disk, but as many bytes to read
    found = content.content([File("big", tmp_path / "big")])
    assert (found.files, found.size) == (1, 300 << 20)
    assert content.hashed(written(tmp_path, a="text") / "a") == (False, hashlib.sha256(b"text").hexdigest(), 4)


def test_a_file_that_goes_away_or_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone can't be read: No such file"):
        content.content([File("gone", tmp_path / "gone")])


@pytest.mark.parametrize("name", ["missing", ".", "x" * 300, "x\0"])
def test_a_single_file_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"image\.requirements: .* is not a file"):
        content.single("image.requirements", tmp_path / name)


def test_the_recipe_is_the_dockerfile_and_the_locks_and_names_its_base() -> None:
    names = {file.name for file in content.recipe()}
    assert {"train.Dockerfile", "images.lock"} <= names
    assert not [name for name in names if name.endswith(".py")]
    assert content.base_image().startswith("docker.io/library/python:3.12-slim-bookworm")
    assert {file.name for file in content.trainer()} > {
        "launch_train/node/__main__.py",
        "launch_train/common/storage/__init__.py",
    }


def test_the_content_of_launchs_own_files_is_kept_until_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "CACHED_FROM", 2)
    files = []
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1\n")
        files.append(File(name, tmp_path / name))

    def of_own_files() -> Content:
        content.content_of_own_files.cache_clear()
        return content.content_of_own_files(tuple(files))

    first = of_own_files()
    assert first == content.content(files)
    with monkeypatch.context() as patch:
        patch.setattr(content, "content", lambda _files: pytest.fail("the files were read again"))
        assert of_own_files() == first
    before = (tmp_path / "b.py").stat()
    (tmp_path / "b.py").write_text("2\n")
    os.utime(tmp_path / "b.py", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert of_own_files() == content.content(files) != first
    (kept,) = (tmp_path / "cache" / "launch").iterdir()
    for damage in ("", kept.read_text()[:-1], "a b c"):
        kept.write_text(damage)
        assert of_own_files() == content.content(files)
    content.content_of_own_files.cache_clear()

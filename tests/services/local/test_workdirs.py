"""Working directories: what a copy of the code holds, and what is found in it afterwards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.images.source_files import File
from launcher.services.local.workdirs import (
    Code,
    WrittenFiles,
    copy,
    make_numbered_folder,
    snapshot,
    working_directories,
    written_files,
)


def source(folder: Path) -> list[File]:
    """A file, a program, one in a subfolder, and a link."""
    (folder / "src").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "src" / "b.py").write_text("b")
    (folder / "link").symlink_to("src/b.py")
    names = {"a.txt": None, "run.sh": None, "src/b.py": None, "link": "src/b.py"}
    return [File(name, folder / name, link) for name, link in names.items()]


def names_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_a_copy_has_the_files_with_the_images_modes_and_no_link_to_the_source(tmp_path: Path) -> None:
    files = source(tmp_path / "code")
    (tmp_path / "code" / "not-listed").touch()
    copy(files, to := tmp_path / "copy")
    assert names_below(to) == {"a.txt", "run.sh", "src/b.py", "link"}
    assert [oct((to / name).stat().st_mode & 0o777) for name in ("a.txt", "run.sh")] == ["0o644", "0o755"]
    assert (to / "link").readlink() == Path("src/b.py")
    assert all((to / file.name).lstat().st_ino != file.path.lstat().st_ino for file in files)
    (to / "a.txt").write_text("changed in place")
    assert (tmp_path / "code" / "a.txt").read_text() == "a"


def test_a_filesystem_that_can_not_copy_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: object) -> int:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "copy_file_range", unable)
    copy(source(tmp_path / "code"), tmp_path / "copy")
    assert (tmp_path / "copy" / "src" / "b.py").read_text() == "b"


def test_a_filesystem_that_fails_in_the_middle_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reading: int, writing: int, count: int) -> int:
        if os.lseek(writing, 0, os.SEEK_CUR):
            raise OSError(5, os.strerror(5))
        return os.write(writing, os.read(reading, min(2, count)))

    monkeypatch.setattr(os, "copy_file_range", broken, raising=False)
    copy(source(tmp_path / "code"), tmp_path / "copy")
    assert (tmp_path / "copy" / "run.sh").read_bytes() == b"#!/bin/sh\n"


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(LaunchError, match=r"a\.txt: No space left on device"):
        copy(source(tmp_path / "code"), tmp_path / "copy")


def test_code_that_has_gone_is_named(tmp_path: Path) -> None:
    files = source(tmp_path / "code")
    (tmp_path / "code" / "a.txt").unlink()
    with pytest.raises(LaunchError, match=r"code/a\.txt: No such file"):
        copy(files, tmp_path / "copy")


def test_new_and_changed_files_are_what_was_written(tmp_path: Path) -> None:
    files = source(tmp_path / "code")
    copy(files, to := tmp_path / "copy")
    assert dict(written_files(files, to)) == {}
    (to / "a.txt").write_text("A")  # of the same length
    (to / "out").mkdir()
    (to / "out" / "ckpt.pt").write_text("1234")
    (to / "src" / "__pycache__").mkdir()
    (to / "src" / "__pycache__" / "b.pyc").touch()
    (to / "run.sh").unlink()
    assert dict(written_files(files, to)) == {"a.txt": 1, "out/ckpt.pt": 4}


def test_each_start_of_a_replica_has_its_own_and_what_they_left_is_moved(tmp_path: Path) -> None:
    files = source(tmp_path / "code")
    lefts: list[WrittenFiles] = []
    code = Code(files, keep=lambda: make_numbered_folder(tmp_path / "kept"))
    for _ in range(2):
        with working_directories(code, tmp_path / f"scratch{len(lefts)}", lefts.append) as make_workdir:
            for replica in ("r0", "r1", "r1", "r1"):
                folder = make_workdir(replica)
                assert names_below(folder) == {file.name for file in files}
                assert [*folder.parent.iterdir()] == [folder]
                if replica == "r1":
                    (folder / "new").write_text("xyz")
    starts = ("r1", "r1.2", "r1.3")
    assert lefts == [WrittenFiles(tmp_path / "kept" / n, {f"{start}/new": 3 for start in starts}) for n in ("1", "2")]
    assert names_below(tmp_path / "kept") == {f"{number}/{start}/new" for number in ("1", "2") for start in starts}


def test_it_is_moved_also_when_the_start_is_broken_off(tmp_path: Path) -> None:
    lefts: list[WrittenFiles] = []
    code = Code(keep=lambda: make_numbered_folder(tmp_path / "kept"))

    def broken_off() -> None:
        with working_directories(code, tmp_path / "s", lefts.append) as make_workdir:
            (make_workdir("a") / "new").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert (tmp_path / "kept" / "1" / "a" / "new").exists()
    assert len(lefts) == 1


def test_files_that_cannot_be_moved_are_reported(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    lefts: list[WrittenFiles] = []
    with working_directories(
        Code(keep=lambda: make_numbered_folder(tmp_path / "full")), tmp_path / "s", lefts.append
    ) as make_workdir:
        (make_workdir("a") / "new").write_text("x")
    ((folder, files, problem),) = lefts
    assert (folder, files, str(tmp_path / "full") in problem) == (None, {"a/new": 1}, True)


def test_files_in_folders_that_the_job_has_closed_are_moved(tmp_path: Path) -> None:
    lefts: list[WrittenFiles] = []
    (outside := tmp_path / "outside").mkdir(mode=0o500)
    with working_directories(
        Code(keep=lambda: make_numbered_folder(tmp_path / "kept")), tmp_path / "s", lefts.append
    ) as make_workdir:
        folder = make_workdir("a")
        (folder / "link").symlink_to(outside)
        for name, mode in (("unreadable", 0), ("read-only", 0o500)):
            (folder / name / "in").mkdir(parents=True)
            (folder / name / "in" / "file").write_text("x")
            (folder / name / "in").chmod(mode)
    assert lefts[0].files == {"a/unreadable/in/file": 1, "a/read-only/in/file": 1}
    assert names_below(tmp_path / "kept") == {"1/a/unreadable/in/file", "1/a/read-only/in/file"}
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_snapshot_is_not_changed_by_a_later_edit(tmp_path: Path) -> None:
    with snapshot(Code(source(tmp_path / "code"))) as code:
        (tmp_path / "code" / "a.txt").write_text("edited")
        copy(code.files, tmp_path / "copy")
    assert (tmp_path / "copy" / "a.txt").read_text() == "a"
    assert (tmp_path / "copy" / "link").is_symlink()

"""The bytes of layers and build contexts depend on names, content and the execute bit alone; what is in them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.errors import LaunchError, UsageError
from launcher.images.archives import BASE_DOCKERFILE, TIME, Layer, Tree, base_context, build_context, layer
from launcher.images.source_files import File, Source
from launcher.inputs.code_files import collect_code
from launcher.inputs.content import content


def folder(at: Path, mode: int = 0o644) -> Path:
    """A package, a script that may be executed, and a link."""
    (at / "pkg" / "deep").mkdir(parents=True)
    (at / "pkg" / "deep" / "m.py").write_text("print(1)\n" * 500)
    (at / "pkg" / "é.txt").write_text("ü")
    (at / "run.sh").write_text("#!/bin/sh\n")
    (at / "pkg" / "deep" / "m.py").chmod(mode)
    (at / "run.sh").chmod(mode | 0o100)
    (at / "link").symlink_to("pkg/deep")
    return at


def made(at: Path, to: Path, owner: int = 1000) -> Layer:
    return layer([Tree("workspace", tuple(collect_code(at)), owner, group_writes=True)], to, "COPY")


def test_times_order_and_umask_do_not_matter(tmp_path: Path) -> None:
    one = made(folder(tmp_path / "a"), tmp_path / "1")
    other = folder(tmp_path / "b", 0o600)
    for path in other.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1, 1))
    (other / "pkg").chmod(0o700)
    two = made(other, tmp_path / "2")
    assert (one.digest, one.diff_id, one.size) == (two.digest, two.diff_id, two.size)
    assert one.path.read_bytes() == two.path.read_bytes()


@pytest.mark.parametrize("change", ["content", "name", "mode", "link", "owner"])
def test_everything_else_does(tmp_path: Path, change: str) -> None:
    before = made(folder(tmp_path / "a"), tmp_path / "1")
    at = tmp_path / "a"
    if change == "content":
        (at / "pkg" / "é.txt").write_text("v")
    elif change == "name":
        (at / "run.sh").rename(at / "go.sh")
    elif change == "mode":
        (at / "run.sh").chmod(0o644)
    elif change == "link":
        (at / "link").unlink()
        (at / "link").symlink_to("pkg")
    after = made(at, tmp_path / "2", owner=0 if change == "owner" else 1000)
    assert before.diff_id != after.diff_id
    assert before.digest != after.digest


def test_what_is_in_it(tmp_path: Path) -> None:
    found = made(folder(tmp_path / "a"), tmp_path / "1")
    packed = found.path.read_bytes()
    plain = gzip.decompress(packed)
    assert found.digest == f"sha256:{hashlib.sha256(packed).hexdigest()}"
    assert found.diff_id == f"sha256:{hashlib.sha256(plain).hexdigest()}"
    assert found.size == len(packed) < len(plain)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        entries = {one.name: (one.type, oct(one.mode), one.linkname) for one in tar.getmembers()}
        assert {(one.uid, one.gid, one.uname, one.mtime) for one in tar.getmembers()} == {(1000, 1000, "", TIME)}
    assert entries == {
        "workspace": (tarfile.DIRTYPE, "0o775", ""),
        "workspace/pkg": (tarfile.DIRTYPE, "0o775", ""),
        "workspace/pkg/deep": (tarfile.DIRTYPE, "0o775", ""),
        "workspace/pkg/deep/m.py": (tarfile.REGTYPE, "0o664", ""),
        "workspace/pkg/é.txt": (tarfile.REGTYPE, "0o664", ""),
        "workspace/run.sh": (tarfile.REGTYPE, "0o775", ""),
        "workspace/link": (tarfile.SYMTYPE, "0o777", "pkg/deep"),
    }


def test_a_name_that_is_long_or_not_utf_8(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.py"
    with open(raw, "wb") as file:  # noqa: PTH123 -- bytes
        file.write(b"1")
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    (deep / "f").write_text("")
    found = made(tmp_path, tmp_path.with_suffix(".gz"))
    with tarfile.open(found.path, errors="surrogateescape") as tar:
        names = tar.getnames()
    assert os.fsencode("workspace/") + b"caf\xe9.py" in [os.fsencode(name) for name in names]
    assert f"workspace/{'d' * 120}/{'e' * 120}/f" in names


def test_a_file_that_has_gone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone can't be read"):
        layer([Tree("workspace", (File("gone", tmp_path / "gone"),))], tmp_path / "1", "")


@pytest.mark.skipif(not Path("/sys/kernel/mm").is_dir(), reason="needs Linux's /sys, whose files say a wrong size")
def test_a_file_that_is_cut_while_it_is_packed(tmp_path: Path) -> None:
    shorter = next(path for path in Path("/sys/kernel/mm").rglob("*") if path.is_file() and os.access(path, os.R_OK))
    assert len(shorter.read_bytes()) < shorter.stat().st_size
    with pytest.raises(UsageError, match="unexpected end of data"):
        layer([Tree("workspace", (File("cut", shorter),))], tmp_path / "1", "")


@pytest.mark.parametrize("change", ["content", "longer", "mode", "link"])
def test_what_changed_since_it_was_hashed_is_not_packed(tmp_path: Path, change: str) -> None:
    at = folder(tmp_path / "a")
    found = tuple(collect_code(at))
    tree = Tree("workspace", found, 1000, content(found).digest, group_writes=True)
    assert layer([tree], tmp_path / "1", "").diff_id == made(at, tmp_path / "2").diff_id
    script = at / "run.sh"
    if change == "content":
        script.write_text("#!/bin/ed\n")
    elif change == "longer":
        script.write_text("#!/bin/sh\necho\n")
    elif change == "mode":
        script.chmod(0o644)
    else:
        tree = tree._replace(files=tuple(file._replace(link="run.sh") if file.link else file for file in found))
    with pytest.raises(LaunchError, match="the code was changed while its image was built"):
        layer([tree], tmp_path / "3", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_disk_that_is_full_is_not_the_sources_fault(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(os.urandom(size))
    with pytest.raises(LaunchError, match="a layer can't be written to /dev: No space left") as refused:
        layer([Tree("workspace", (File("a", tmp_path / "a"),))], Path("/dev/full"), "")
    assert "TMPDIR" in refused.value.hint


# --- Build contexts ---------------------------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)


def source(folder: Path) -> Source:
    write(
        folder,
        **{"train.Dockerfile": "FROM x", "requirements.lock": "numpy", "node.py": "1", "a.py": "2", "torch.whl": "3"},
    )
    (folder / "run.sh").write_text("4")
    (folder / "run.sh").chmod(0o700)
    return Source(
        recipe=tuple(File(name, folder / name) for name in ("train.Dockerfile", "requirements.lock")),
        trainer=(
            File("launch_train/node/__main__.py", folder / "node.py"),
            File("launch_train/data/a.py", folder / "a.py"),
        ),
        code=(
            File("run.sh", folder / "run.sh"),
            File("pkg/deep/a.py", folder / "a.py"),
            File("link", folder / "a.py", "pkg/deep/a.py"),
        ),
        requirements="wandb\n",
        torch=folder / "torch.whl",
    )


def entries(made: Source) -> dict[str, tarfile.TarInfo]:
    with build_context(made) as file, tarfile.open(fileobj=file) as tar:
        return {one.name: one for one in tar.getmembers()}


def test_everything_lies_where_the_dockerfile_looks_for_it(tmp_path: Path) -> None:
    found = entries(source(tmp_path / "a"))
    assert {name for name, one in found.items() if not one.isdir()} == {
        "train.Dockerfile", "requirements.lock", "requirements.txt", "launch_train/node/__main__.py",
        "launch_train/data/a.py", "code/run.sh", "code/pkg/deep/a.py", "code/link", "torch/torch.whl",
    }  # fmt: skip
    assert {name for name, one in found.items() if one.isdir()} == {
        "launch_train", "launch_train/data", "launch_train/node", "code", "code/pkg", "code/pkg/deep", "torch",
    }  # fmt: skip
    assert {name: one.mode for name, one in found.items() if one.isfile()} == {
        name: 0o775 if name == "code/run.sh" else 0o664 if name.startswith("code/") else 0o644
        for name, one in found.items()
        if one.isfile()
    }
    assert {name: one.mode for name, one in found.items() if one.isdir()} == {
        name: 0o775 if name.startswith("code") else 0o755 for name, one in found.items() if one.isdir()
    }
    assert found["code/link"].linkname == "pkg/deep/a.py"
    assert {(one.uid, one.gid, one.mtime) for one in found.values()} == {(0, 0, 315_532_800)}


def test_folders_that_copy_needs_are_there_when_they_are_empty() -> None:
    found = entries(Source())
    assert {name for name, one in found.items() if one.isdir()} == {"launch_train", "code", "torch"}
    assert found["requirements.txt"].size == 0


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = source(tmp_path / "one"), source(tmp_path / "two")
    for path in (tmp_path / "two").iterdir():
        os.utime(path, (1, 1))
        path.chmod(0o777 if path.name == "run.sh" else 0o600)
    second = replace(second, code=second.code[::-1], trainer=second.trainer[::-1], recipe=second.recipe[::-1])
    with build_context(first) as one, build_context(second) as two:
        assert one.read() == two.read()


def test_the_context_of_a_users_dockerfile_is_the_code(tmp_path: Path) -> None:
    made = replace(source(tmp_path / "a"), base_dockerfile="FROM x\n")
    with base_context(made) as file, tarfile.open(fileobj=file) as tar:
        assert sorted(tar.getnames()) == [BASE_DOCKERFILE, "link", "pkg/deep/a.py", "run.sh"]


def test_a_recipe_of_one_spec_takes_the_place_of_the_default(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    made = source(folder)
    (folder / "uv.lock").write_text("x")
    own = replace(
        made,
        dockerfile="FROM mine\n",
        locks=(File("requirements.lock", folder / "requirements.lock"),),
        project=(File("uv.lock", folder / "uv.lock"),),
    )
    with build_context(own) as file, tarfile.open(fileobj=file) as tar:
        contents = {name: tar.extractfile(name) for name in ("train.Dockerfile", "requirements.txt")}
        texts = {name: content.read() for name, content in contents.items() if content}
        assert {"requirements.lock", "uv.lock"} <= set(tar.getnames())
    assert texts == {"train.Dockerfile": b"FROM mine\n", "requirements.txt": b"wandb\n"}

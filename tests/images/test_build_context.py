"""The build context: what is in it, and that nothing else tells in its bytes."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.errors import UsageError
from launcher.images.archives import BASE_DOCKERFILE, base_context, build_context
from launcher.images.source_files import File, Source


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


def test_the_users_requirements_travel_as_a_file() -> None:
    with build_context(Source(requirements="wandb\n")) as file, tarfile.open(fileobj=file) as tar:
        content = tar.extractfile("requirements.txt")
        assert content
        assert content.read() == b"wandb\n"


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


def test_a_file_that_has_gone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.py can't be read"):
        build_context(Source(code=(File("gone.py", tmp_path / "gone.py"),)))


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
        content = tar.extractfile("train.Dockerfile")
        assert content
        assert content.read() == b"FROM mine\n"
        assert {"requirements.lock", "uv.lock", "requirements.txt"} <= set(tar.getnames())

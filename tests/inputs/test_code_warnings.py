"""What a plan can see of the code that will fail on the job's machine: warnings with their lines, and no others."""

from __future__ import annotations

import json
import re
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from launcher.images.source_files import File, UserCode
from launcher.inputs.python_files import image_modules, modules_of, normalised, unprovided
from tests.command import ROOT, launch

HEAD = "name: a\nmachine: {type: l4}\nregions: any\n"
SCRIPT = HEAD + "run: {script: main.py}\n"


def written(folder: Path, **files: str) -> None:
    """Files by their names: `__` is a slash, and what has no suffix is Python."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def warned(folder: Path, text: str = SCRIPT, target: str = "vertex") -> list[str]:
    """The warnings about a spec's code."""
    (folder / "job.yaml").write_text(text)
    ran = launch(target, "job.yaml", "--dry-run", "-o", "json", cwd=folder)
    assert ran.code == 0, ran.err
    lines: list[str] = json.loads(ran.out)["warnings"]
    return [line for line in lines if "import" in line or "of this machine" in line or "image lacks" in line]


def lines_of(found: list[str]) -> list[tuple[str, str]]:
    """(file:line, module) of warnings about imports."""
    return [(one[1], one[2]) for line in found if (one := re.match(r"(\S+:\d+): imports (\w+)", line))]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import os\nimport nowhere\n", 2),
        ("from nowhere.deep import thing\n", 1),
        ("import os, nowhere\n", 1),
        ("if __name__ == '__main__':\n    import nowhere\n", 2),
        ("try:\n    import nowhere\nfinally:\n    pass\n", 2),
    ],
)
def test_an_unresolved_import(tmp_path: Path, code: str, line: int) -> None:
    written(tmp_path, main=code)
    assert lines_of(warned(tmp_path)) == [(f"main.py:{line}", "nowhere")]
    assert lines_of(warned(tmp_path, target="local")) == [(f"main.py:{line}", "nowhere")]


def test_a_file_with_the_name_of_a_package_that_the_image_has(tmp_path: Path) -> None:
    written(tmp_path, main="import torch\n", torch="", launch_train="", pkg__numpy="")
    for target in ("vertex", "local"):
        (line,) = warned(tmp_path, target=target)
        assert line.startswith("torch.py hides the installed package torch")


def test_an_import_of_a_file_of_the_code_that_is_imported(tmp_path: Path) -> None:
    written(tmp_path, main="from pkg import one\n", pkg__one="from . import two\n", pkg__two="\nimport nowhere\n")
    assert lines_of(warned(tmp_path)) == [("pkg/two.py:2", "nowhere")]
    written(tmp_path, main="import os\n")
    assert warned(tmp_path) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os, sys, json, tomllib, distutils\nfrom __future__ import annotations\n",
        "import torch, numpy as np, yaml, PIL.Image, google.cloud.storage, pynvml, tqdm, transformers, functorch\n",
        "from torch.utils.data import DataLoader\nimport tensorboard, pkg_resources, safetensors.torch\n",
        "from launch_train import metrics, checkpoint\n",
        "try:\n    import nowhere\nexcept ImportError:\n    nowhere = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nowhere\n",
        "import sys\nif sys.version_info < (3, 11):\n    import tomli\nelse:\n    import tomllib\n",
        "def f():\n    import nowhere\n",
        "from contextlib import suppress\nwith suppress(ImportError):\n    import nowhere\n",
        "import helper, pkg.deep, data\nfrom src import inner\nimport inner\n",
        "import extension\n",
    ],
)
def test_no_false_alarm(tmp_path: Path, code: str) -> None:
    written(tmp_path, main=code, helper="", pkg__deep="", data____init__="", src__inner="")
    (tmp_path / "extension.cpython-312-x86_64-linux-gnu.so").write_bytes(b"")
    assert warned(tmp_path) == []


def test_what_an_image_of_ones_own_has_is_unknown(tmp_path: Path) -> None:
    written(tmp_path, main="import nowhere\n")
    assert warned(tmp_path, SCRIPT + f"image: {{base: 'example.com/mine@sha256:{'0' * 64}'}}\n") == []


@pytest.mark.parametrize(
    ("command", "image", "is_warned"),
    [
        ("make", "", True),
        ("make", "requirements: needs.txt", True),
        ("make", "setup: [apt-get install -y make]", False),
        ("make", f"base: 'example.com/mine@sha256:{'0' * 64}'", False),
        ("deepspeed", "", True),
        ("accelerate", "requirements: needs.txt", False),  # trl requires it
        ("accelerate", "", True),
        *((command, "", False) for command in ("python", "torchrun", "sh", "bash", "./make", "somebody-s-program")),
    ],
)
def test_a_program_that_the_image_lacks(tmp_path: Path, command: str, image: str, is_warned: bool) -> None:
    written(tmp_path, main="")
    (tmp_path / "needs.txt").write_text("trl\n")
    (tmp_path / "job.yaml").write_text(HEAD + f"image: {{code: ., {image}}}\nrun: {{command: [{command}, all]}}\n")
    ran = launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path)
    found = [line for line in json.loads(ran.out)["warnings"] if "run.command" in line]
    assert bool(found) is is_warned, found
    assert all(line.startswith(f"run.command: the image has no {command}; add ") for line in found)
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\nname = 'own'\nversion = '1'\nscripts = {{{command} = 'main:f'}}\n"
    )
    if "/" not in command:
        ran = launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path)
        assert not [line for line in json.loads(ran.out)["warnings"] if "run.command" in line]


def test_what_the_requirements_require_in_turn_is_unknown(tmp_path: Path) -> None:
    written(tmp_path, main="import accelerate\n")
    (tmp_path / "needs.txt").write_text("trl\n")
    assert warned(tmp_path, SCRIPT + "image: {requirements: needs.txt}\n") == []


def test_large_code_is_read_in_part(tmp_path: Path) -> None:
    """Hundreds of modules, or megabytes of them, don't hold up a plan."""
    names = [f"m{number}.py" for number in range(300)]
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f"import m{number + 1}\nimport nowhere{number}\n")
    code = UserCode(folder=tmp_path, files=tuple(File(name, tmp_path / name) for name in names))
    assert len(unprovided(names[:1], code)) == 11
    (tmp_path / "m0.py").write_text("import nowhere\n" + "#" * 2_000_000)
    assert unprovided(names[:1], code) == ()


@pytest.mark.parametrize("word", ["{0}", "--data={0}", "data.root={0}"])
def test_a_path_of_this_machine_in_the_arguments(tmp_path: Path, word: str) -> None:
    written(tmp_path, main="")
    (tmp_path / "corpus").mkdir()
    arguments = f"  args:\n    - --lr=1\n    - {word.format(tmp_path / 'corpus')}\n"
    text = HEAD + "run:\n  script: main.py\n" + arguments
    (line,) = warned(tmp_path, text)
    assert line.startswith("job.yaml:8: run.args: ")
    assert str(tmp_path / "corpus") in line
    assert warned(tmp_path, text, target="local") == []


def test_paths_that_the_job_has(tmp_path: Path) -> None:
    written(tmp_path, main="")
    words = ["/gcs/bucket/data", "--tmp=/tmp", "--sh=/usr/bin/env", "/no/such/path", "a/b", "--x=1", "//", "/", "~"]
    assert warned(tmp_path, HEAD + f"run: {{script: main.py, args: {json.dumps(words)}}}\n") == []


@pytest.mark.parametrize(
    ("module", "file"), [("own", "own.py"), ("own.main", "own/main.py"), ("own", "own/__main__.py")]
)
def test_the_specs_folder_is_the_code_of_a_module(tmp_path: Path, module: str, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text(HEAD + f"run: {{module: {module}}}\n")
    ran = launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["image"]["files"] == 1


@pytest.mark.parametrize("image", ["", "image: {code: .}\n"])
def test_a_missing_module(tmp_path: Path, image: str) -> None:
    written(tmp_path, other="")
    (tmp_path / "job.yaml").write_text(HEAD + image + "run:\n  module: own.main\n")
    for target in ("vertex", "vm", "local"):
        ran = launch(target, "job.yaml", "--dry-run", *(["--run"] if target == "vm" else []), cwd=tmp_path)
        assert (ran.code, ran.out) == (2, ""), ran.shown
        assert ran.err.startswith(f"error: job.yaml:{5 if not image else 6}: run.module: own.main")


@pytest.mark.parametrize("module", ["launch_train.bench", "torch.distributed.run", "http.server"])
def test_a_module_of_the_image(tmp_path: Path, module: str) -> None:
    assert warned(tmp_path, HEAD + f"run: {{module: {module}}}\n") == []


def test_a_module_that_a_requirement_may_bring(tmp_path: Path) -> None:
    (tmp_path / "needs.txt").write_text("mine\n")
    found = HEAD + "image: {requirements: needs.txt}\nrun: {module: mine.main}\n"
    (tmp_path / "job.yaml").write_text(found)
    ran = launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path)
    assert any(line.startswith("run.module: mine.main") for line in json.loads(ran.out)["warnings"])


def test_the_recipes_have_no_such_warning() -> None:
    for spec in sorted((ROOT / "job_specs").glob("*.yaml")):
        target = "vm" if spec.name.startswith("vm-") else "local" if spec.name == "quickstart.yaml" else "vertex"
        argv = (target, str(spec), *(["--run"] if spec.name.startswith("vm-train") else []))
        ran = launch(*argv, "--dry-run", "-o", "json")
        assert not [one for one in json.loads(ran.out)["warnings"] if "import" in one or "machine;" in one], spec


def test_the_names_of_modules_are_those_of_the_installed_packages() -> None:
    """Of the image's packages that are installed here, each public module is known."""
    locks = "".join(lock.read_text() for lock in (ROOT / "containers").glob("*.lock"))
    locked = {normalised(name) for name in re.findall(r"^([a-z0-9._-]+)==", locks, re.MULTILINE)}
    unknown = [
        (module, package)
        for module, packages in packages_distributions().items()
        for package in packages
        if normalised(package) in locked and not module.startswith("_") and module not in modules_of(package)
    ]
    odd = {"example", "isympy", "tiktoken_ext"}  # nobody imports these
    assert [one for one in unknown if one[0] not in image_modules() | odd] == []

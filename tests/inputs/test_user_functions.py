"""The user's own functions that `run.config` names: their folder is the code, and their modules are in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT, launch

SPEC = (
    "name: a\nmachine: {type: l4}\nregions: any\n"
    "run: {config: {model: 'pkg.model:build', loss: 'mine:loss', data: {block_size: 8}}}\n"
)


def project(folder: Path, text: str = SPEC, *modules: str) -> Path:
    """A folder with modules and a spec; the spec is returned."""
    for name in modules or ("pkg/model.py", "mine.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def build(): ...\n\n\ndef loss(): ...\n\n\nb = loss\n")
    spec = folder / "job.yaml"
    spec.write_text(text)
    return spec


def planned(spec: Path, *flags: str | Path, target: str = "vertex") -> dict[str, Any]:
    ran = launch(target, spec, "--dry-run", "-o", "json", *flags)
    assert ran.code == 0, ran.err
    made: dict[str, Any] = json.loads(ran.out)
    return made


def refused(*argv: str | Path, cwd: Path = ROOT) -> str:
    ran = launch(*argv, "--dry-run", cwd=cwd)
    assert (ran.code, ran.out) == (2, "")
    return ran.err


@pytest.mark.parametrize("target", ["vertex", "local"])
def test_the_specs_own_folder_is_the_code(tmp_path: Path, target: str) -> None:
    spec = project(tmp_path)
    before = planned(spec, target=target)["run"]
    assert planned(spec, "--set", f"image.code={tmp_path}", target=target)["run"] == before
    (tmp_path / "pkg/model.py").write_text("def build(): return 1\n")
    assert planned(spec, target=target)["run"] != before


@pytest.mark.parametrize("config", ["{data: {path: 'pkg.model:build'}}", "{data: 'pkg.model:build'}", "{loss: 'a:b'}"])
def test_each_place_that_may_name_a_function(tmp_path: Path, config: str) -> None:
    text = SPEC.partition("run:")[0] + f"run: {{config: {config}}}\n"
    name = "a" if "a:b" in config else "pkg/model"
    said = refused("vertex", project(tmp_path, text, "other.py"))
    assert f"no {name}.py in the code in {tmp_path}" in said
    planned(project(tmp_path, text, f"{name}.py"))
    planned(project(tmp_path, text, f"{name}/__init__.py"))


def test_a_module_that_is_not_there_is_named_with_what_is_like_it(tmp_path: Path) -> None:
    said = refused("vertex", project(tmp_path, SPEC, "pkg/modle.py", "mine.py"))
    assert "run.config.model: pkg.model:build: no pkg/model.py in the code in" in said
    assert "Did you mean pkg/modle.py?" in said
    (tmp_path / "pkg/modle.py").unlink()
    assert "If a package provides it, add the package to image.requirements." in refused(
        "vertex", tmp_path / "job.yaml"
    )


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("class Built: ...", "Did you mean Built?"),
        ("", "The part after the colon must be a function in that file."),
        ("print(build)", "The part after"),
        ("def make():\n    build = 1\n    return build", "The part after"),
        ("class Model:\n    def build(self): ...", "The part after"),
        ("def outer():\n    def build(): ...", "The part after"),
        ("def outer():\n    from elsewhere import build", "The part after"),
    ],
)
def test_a_name_that_its_file_lacks(tmp_path: Path, module: str, hint: str) -> None:
    spec = project(tmp_path)
    (tmp_path / "pkg/model.py").write_text(module)
    said = refused("vertex", spec)
    assert "run.config.model: pkg.model:build: pkg/model.py has no build" in said
    assert hint in said


@pytest.mark.parametrize(
    "module",
    [
        "class build: ...",
        "from elsewhere import make as build",
        "import build.more",
        "if True:\n    build = 1",
        "def f():\n    global build\n    build = 1",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "globals()['bu' 'ild'] = 1",
        "locals()['bu' 'ild'] = 1",
        "import sys\nsys.modules[__name__] = lazy()",
        "import sys\nsys.modules[__name__].__dict__.update(names)",
        "match 1:\n    case build: ...",
        "def make[T](x: T) -> T: ...  # Python 3.12",
        "try:\n    from fast import build\nexcept ImportError:\n    build = None",
        "with open('x') as build: ...",
    ],
)
def test_a_file_that_has_it_or_may_have_it(tmp_path: Path, module: str) -> None:
    spec = project(tmp_path)
    (tmp_path / "pkg/model.py").write_text(module)
    planned(spec)


STARTED = [
    (SPEC, "pkg/model.py"),
    (SPEC.partition("run:")[0] + "run: {script: ./train_own.py}\n", "train_own.py"),
    (SPEC.partition("run:")[0] + "run: {module: own.main}\n", "own/main.py"),
    (SPEC.partition("run:")[0] + "run: {module: own}\n", "own/__main__.py"),
]
BASE = f"image: {{base: 'example.com/mine@sha256:{'0' * 64}'}}\n"


@pytest.mark.parametrize(("text", "module"), STARTED)
@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def build(x:\n    return x\n", 1),
        ("x = 1\nif x\n    build = 1\n", 2),
        ("x = 1\n  build = 2\n", 2),
        ("x = 1\nprint 'x'\n", 2),
        ("<<<<<<< HEAD\n", 1),
        ("try: build = 1\nexcept A, B: pass\n", 2),
    ],
)
def test_a_syntax_error_is_refused(tmp_path: Path, text: str, module: str, code: str, line: int) -> None:
    spec = project(tmp_path, text, module, "mine.py")
    planned(spec)
    (tmp_path / module).write_text(code)
    assert f"{module}:{line}: " in refused("vertex", spec)
    assert f"{module}:{line}: " in refused("local", spec)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python takes it")
@pytest.mark.parametrize(("text", "module"), STARTED)
@pytest.mark.parametrize(
    "code",
    [
        "def build[T](x: T) -> T: ...",
        "class build[T]: ...",
        "type build = int",
        'a = {"b": 1}\nbuild = f"{a["b"]}"',
        'build = f"{\n1}"',
    ],
)
def test_what_only_the_images_python_can_read_is_a_warning(tmp_path: Path, text: str, module: str, code: str) -> None:
    spec = project(tmp_path, text, module, "mine.py")
    before = planned(spec)["warnings"]
    (tmp_path / module).write_text(code)
    (ours,) = [line for line in planned(spec)["warnings"] if line not in before]
    assert ours.startswith(f"{module}:")


def test_an_image_whose_python_is_unknown(tmp_path: Path) -> None:
    spec = project(tmp_path, SPEC + BASE, "pkg/model.py", "mine.py")
    before = planned(spec)["warnings"]
    (tmp_path / "mine.py").write_text("def build(x:\n    return x\n")
    (ours,) = [line for line in planned(spec)["warnings"] if line not in before]
    assert ours.startswith("mine.py:1:")


def test_null_bytes_are_no_python(tmp_path: Path) -> None:
    spec = project(tmp_path)
    (tmp_path / "mine.py").write_text("\0")
    assert "mine.py" in refused("vertex", spec)


def test_a_package_may_provide_the_function(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("einops==0.8\n")
    spec = project(tmp_path, SPEC + "image: {requirements: requirements.txt}\n", "mine.py")
    warned = "pkg.model:build is not in the code, so a package in the image must provide it"
    assert planned(spec)["warnings"][0] == warned
    project(tmp_path, SPEC + "image: {requirements: requirements.txt}\n")
    assert warned not in planned(spec)["warnings"]


@pytest.mark.parametrize(
    "config",
    ["{model: 'hf:vit'}", "{model: gpt, loss: 'torch.nn.functional:cross_entropy'}", "{data: /gcs/a/b}", "{}"],
)
def test_what_needs_no_code(tmp_path: Path, config: str) -> None:
    text = SPEC.partition("run:")[0] + f"run: {{config: {config}}}\n"
    one = planned(project(tmp_path, text, "one.py"))["run"]
    assert planned(project(tmp_path, text, "two.py"))["run"] == one


def test_an_image_of_ones_own_has_its_own_functions(tmp_path: Path) -> None:
    spec = project(tmp_path, SPEC, "other.py")
    planned(spec, "--image", "us-docker.pkg.dev/p/r/i@sha256:" + "a" * 64)


def test_a_function_needs_a_spec_of_ones_own(tmp_path: Path) -> None:
    said = refused("vertex", "--set", "run={config: {model: 'mine:build', data: {block_size: 8}}}", cwd=tmp_path)
    assert "run.config.model: mine:build is relative to the spec's folder, but" in said

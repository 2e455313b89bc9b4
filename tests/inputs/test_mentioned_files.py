"""Plans name the files that a script or its arguments mention and that the image will not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.inputs import named_paths
from launcher.inputs.code_files import collect_code
from launcher.inputs.named_paths import mentioned, named_but_ignored, named_outside
from launcher.spec.reader import read
from tests.inputs.test_user_functions import planned

HEAD = "name: a\nmachine: {type: l4}\nregions: any\n"
TRAIN = """\
import os, helper
from pkg.reading import read
dataset = "shakespeare"
for key in ["batch"]: exec(open("config/char.py").read())
data = open(os.path.join("data", dataset, "train.bin"))
"""


def project(folder: Path, run: str, ignore: str, **files: str) -> Path:
    """A spec beside files by name: two underscores are a dot, three a slash."""
    for name, text in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / ".gitignore").write_text(ignore)
    (folder / "job.yaml").write_text(f"{HEAD}run: {run}\n")
    return folder / "job.yaml"


def found(file: Path) -> list[str]:
    names = [one.name for one in collect_code(file.parent, frozenset([file]))]
    spec = read(file)
    folder = file.parent
    return sorted(named_but_ignored(mentioned(spec, folder, names), spec, folder, names, ["job.yaml"]))


@pytest.mark.parametrize(
    ("run", "ignore", "files", "expected"),
    [
        (
            "{script: train.py}",
            "*.bin\n",
            {"data___shakespeare___train__bin": "x"},
            ["data/shakespeare/train.bin (train.py:5)"],
        ),
        (
            "{script: train.py}",
            "data/\n",
            {"data___shakespeare___train__bin": "x"},
            ["data/shakespeare/train.bin (train.py:5)"],
        ),
        ("{script: train.py}", "*.bin\n", {"data___other__bin": "x"}, ["data/ (train.py:5)"]),
        ("{script: a.py}", "out/\n", {"a__py": "save = 'out'", "out___ckpt__pt": ""}, []),
        ("{script: a.py, args: [out]}", "out/\n", {"a__py": "", "out___ckpt__pt": ""}, ["out/ (run.args)"]),
        (
            "{script: train.py}",
            "*.txt\n",
            {"helper__py": "open('./notes.txt')", "notes__txt": ""},
            ["notes.txt (helper.py:1)"],
        ),
        ("{script: train.py}", "*.txt\n", {"not_imported__py": "open('notes.txt')", "notes__txt": ""}, []),
        (
            "{script: train.py}",
            "*.txt\n",
            {"pkg___reading__py": "from . import deep", "pkg___deep__py": "N = 'notes.txt'", "pkg___notes__txt": ""},
            ["pkg/notes.txt (pkg/deep.py:1)"],
        ),
        (
            "{script: train.py, args: [config/char.py]}",
            "raw/\n",
            {"config___char__py": "d = 'raw/'", "raw___a": ""},
            ["raw/ (config/char.py:1)"],
        ),
        (
            "{script: train.py, args: [--data, set/]}",
            "*.bin\n",
            {"set___a__bin": "", "set___b__py": ""},
            ["set/a.bin (run.args)"],
        ),
        ("{script: train.py, args: [--data=set]}", "set\n", {"set___a": ""}, ["set/ (run.args)"]),
        (
            "{script: src/main.py}",
            "*.csv\n",
            {"src___main__py": "open('../a.csv'); open('b.csv')", "a__csv": "", "src___b__csv": ""},
            ["a.csv (src/main.py:1)", "src/b.csv (src/main.py:1)"],
        ),
        (
            "{command: [bash, run.sh, set.bin]}\nimage: {code: .}",
            "*.bin\n",
            {"run__sh": "", "set__bin": ""},
            ["set.bin (run.args)"],
        ),
        ("{module: pkg}\nimage: {code: .}", "*.bin\n", {"pkg_____main____py": "open('set.bin')", "set__bin": ""}, []),
        (
            "{script: train.py}",
            "*.bin\n",
            {"data___shakespeare___train__bin": "x", "helper__py": "raise ("},
            ["data/shakespeare/train.bin (train.py:5)"],
        ),
    ],
)
def test_what_is_named(tmp_path: Path, run: str, ignore: str, files: dict[str, str], expected: list[str]) -> None:
    assert found(project(tmp_path, run, ignore, **{"train__py": TRAIN, **files})) == expected


@pytest.mark.parametrize(
    ("run", "script", "expected"),
    [
        ("{script: src/main.py}", "MNIST('../data')", ["../data (src/main.py:1)"]),
        ("{script: src/main.py}", "a = 1\nopen('sub/../../x/y')", ["../x/y (src/main.py:2)"]),
        ("{script: src/main.py, args: [--data=../set]}", "", ["../set (run.args)"]),
        ("{script: src/main.py, args: [--data, ../set/]}", "", ["../set (run.args)"]),
        ("{script: src/main.py}", "open('sub/../data'); import sys; sys.path.append('..'); '...and so on'", []),
        ("{script: src/main.py}", "from os import path\nopen(path.join(path.dirname(__file__), '../data'))", []),
        (
            "{script: src/main.py}",
            "hydra.main(config_path='../configs'); _base_ = ['../configs/a.py', '../configs/gone.py']",
            ["../configs/gone.py (src/main.py:1)"],
        ),
        ('{command: [sh, -c, "cd src && exec python main.py"]}', "MNIST('../data')", []),
    ],
)
def test_paths_that_lead_out_of_the_code(tmp_path: Path, run: str, script: str, expected: list[str]) -> None:
    """A job's working directory is /workspace, and only root may write above it."""
    file = project(tmp_path, run, "", src___main__py=script, configs___a__py="")
    names = [one.name for one in collect_code(tmp_path, frozenset([file]))]
    assert named_outside(mentioned(read(file), tmp_path, names), names) == tuple(expected)


def test_the_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a million ignored images does not hold up a dry run."""
    file = project(tmp_path, "{script: train.py}", "*.bin\n", train__py=TRAIN, train__bin="")
    for number in range(20):
        (tmp_path / "deep" / str(number)).mkdir(parents=True)
        (tmp_path / "deep" / str(number) / "train.bin").touch()
    assert len(found(file)) == 21
    monkeypatch.setattr(named_paths, "MOST_ENTRIES", 5)
    assert found(file) == ["train.bin (train.py:5)"]


@pytest.mark.parametrize("target", ["vertex", "local", "vm"])
def test_each_plan_warns(tmp_path: Path, target: str) -> None:
    file = project(tmp_path, "{script: train.py}", "*.bin\n", train__py=TRAIN, data___train__bin="x", helper__py="")
    more = ("--run",) if target == "vm" else ()
    (warning,) = [text for text in planned(file, *more, target=target)["warnings"] if "train.bin" in text]
    assert "data/train.bin (train.py:5)" in warning
    (tmp_path / ".gitignore").unlink()
    assert not [text for text in planned(file, *more, target=target)["warnings"] if "train.bin" in text]


@pytest.mark.parametrize("target", ["vertex", "local", "vm"])
def test_each_plan_warns_of_paths_outside(tmp_path: Path, target: str) -> None:
    file = project(tmp_path, "{script: main.py}", "", main__py="MNIST('../data', download=True)")
    more = ("--run",) if target == "vm" else ()
    (warning,) = [text for text in planned(file, *more, target=target)["warnings"] if "../data" in text]
    assert "../data (main.py:1)" in warning

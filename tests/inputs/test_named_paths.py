"""Paths that a spec or its code names: data of `run.config` is where the job runs; of the others, plans warn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.images.source_files import UserCode
from launcher.inputs import named_paths
from launcher.inputs.code_files import collect_code
from launcher.inputs.named_paths import mentioned, named_but_ignored, named_outside
from launcher.spec.reader import read
from tests.command import launch
from tests.inputs.test_user_functions import planned, project, refused

HEAD = "name: a\nmachine: {type: l4}\nregions: any\n"


def spec(folder: Path, data: str, *files: str, more: str = "") -> Path:
    return project(folder, f"{HEAD}run: {{config: {{data: {data}}}}}\n{more}", *(files or ("other.py",)))


@pytest.mark.parametrize(
    ("data", "files"),
    [
        ("text.txt", ("text.txt",)),
        ("./corpus", ("corpus/a.txt",)),
        ("corpus/", ("corpus/b/c.txt",)),
        ("{path: 'gs://bucket/corpus', tokenizer: tokenizer.json}", ("tokenizer.json",)),
        ("'shards/*_train_*.bin'", ("shards/a_train_0.bin", "shards/a_val_0.bin")),
        ("'shards/**/*.bin'", ("shards/a/0.bin",)),
        ("/gcs/bucket/corpus", ()),
        ("synthetic", ()),
        ("{path: python-stdlib, tokenizer: 'tiktoken:gpt2'}", ()),
    ],
)
def test_paths_that_the_job_has(tmp_path: Path, data: str, files: tuple[str, ...]) -> None:
    planned(spec(tmp_path, data, *files))


def test_files_beside_the_spec_are_taken_along_as_code(tmp_path: Path) -> None:
    first = planned(spec(tmp_path, "text.txt", "text.txt"))["run"]
    (tmp_path / "text.txt").write_text("another text")
    assert planned(tmp_path / "job.yaml")["run"] != first


@pytest.mark.parametrize(
    ("target", "data", "words"),
    [
        ("vertex", "text.txt", "run.config.data: text.txt is not in the code in"),
        ("vertex", "corpse", "gs://BUCKET/"),
        ("vertex", "'other*.bin'", "run.config.data: other*.bin is not in the code in"),
        ("local", "'/no/such/*.bin'", "run.config.data: /no/such/*.bin does not exist on this machine"),
        ("vm", "../text.txt", "run.config.data: ../text.txt is not in the code in"),
        (
            "vertex",
            "/home/me/corpus",
            "/home/me/corpus does not exist on the job's machine, which has only the code",
        ),
        ("vertex", "~/corpus", "~/corpus does not exist on the job's machine"),
        ("vertex", "/gcs/../etc", "does not exist on the job's machine"),
        ("vm", "/gcs/bucket/corpus", "does not exist on the job's machine"),
        ("vertex", "{path: synthetic, tokenizer: t.json}", "run.config.data.tokenizer: t.json is not in the code"),
        ("local", "text.txt", "run.config.data: text.txt is not in the code in"),
        ("local", "/no/such", "run.config.data: /no/such does not exist on this machine"),
    ],
)
def test_paths_that_the_job_lacks(tmp_path: Path, target: str, data: str, words: str) -> None:
    training = ("--run",) if target == "vm" else ()
    assert words in refused(target, spec(tmp_path, data, "other.py"), *training)


MOUNTED = "vertex: {nfs: [{server: 10.0.0.2, path: share, mount_point: data}]}\n"


@pytest.mark.parametrize(
    ("target", "path", "more", "advice"),
    [
        ("vm", "/gcs/bucket/x", "", "add it to the spec: mounts: [{bucket: bucket}]"),
        ("vm", "--data=/gcs/bucket/x", "", "mounts: [{bucket: bucket}]"),
        ("vm", "--data=/gcs/bucket/x", "mounts: [{bucket: buckets}]\n", "mounts: [{bucket: bucket}]"),
        ("vm", "--data=/gcs/bucket/x", "mounts: [{bucket: bucket}]\n", ""),
        ("vm", "/mnt/nfs/data/x", "", "mounts: [{nfs: SERVER:/SHARE, path: /mnt/nfs/data}]"),
        ("vm", "/mnt/nfs/data/x", "mounts: [{nfs: 's:/a', path: /mnt/nfs/data}]\n", ""),
        ("vertex", "/mnt/nfs/data/x", "", "mounts: [{nfs: SERVER:/SHARE, path: /mnt/nfs/data}]"),
        ("vertex", "/mnt/nfs/database/x", MOUNTED, "mounts: [{nfs: SERVER:/SHARE, path: /mnt/nfs/database}]"),
        ("vertex", "/mnt/lustre/data/x", MOUNTED, "mounts: [{lustre: IP@tcp:/NAME, path: /mnt/lustre/data}]"),
        ("vertex", "/mnt/nfs/data/../x", MOUNTED, "mounts: [{nfs: "),
        ("vertex", "/mnt/nfs/data/x", MOUNTED, ""),
        ("vertex", "/gcs/bucket/x", "", ""),
        ("vertex", "gs://bucket/x", "", ""),
        ("vm", "/mnt/localssd/x", "", ""),
        ("local", "/gcs/bucket/x", "", ""),
    ],
)
def test_a_mount_that_the_machine_does_not_have(tmp_path: Path, target: str, path: str, more: str, advice: str) -> None:
    network = "projects/1/global/networks/n"
    account = f"identity: {{service_account: a@my-project.iam.gserviceaccount.com, network: {network}}}\n"
    text = f"{HEAD}run: {{script: main.py, args: ['{path}']}}\n{account}{more}"
    file = project(tmp_path, text, "main.py")
    found = planned(file, *(("--run",) if target == "vm" else ()), target=target)["warnings"]
    said = [line for line in found if "is not mounted" in line]
    assert len(said) == bool(advice)
    assert all("job.yaml:4: run.args: " in line and advice in line for line in said)


def argument_warnings(folder: Path, word: str, *, target: str = "vertex", more: str = "") -> list[str]:
    """The warnings about one argument of a script whose code is src/, without those about mounts."""
    (folder / "src").mkdir(exist_ok=True)
    text = f"{HEAD}run: {{script: main.py, args: ['{word}']}}\nimage: {{code: src}}\n{more}"
    file = project(folder, text, "src/main.py", "src/in_code.py")
    found = planned(file, *(("--run",) if target == "vm" else ()), target=target)["warnings"]
    return [line for line in found if "job.yaml:4: run.args: " in line and "is not mounted" not in line]


@pytest.mark.parametrize(
    ("target", "word", "more", "warns"),
    [
        # --- no such path here
        ("vertex", "/data/corpus", "", True),
        ("vertex", "--data=/home/me/corpus", "", True),
        ("vm", "/mnt/disks/corpus", "", True),
        ("vm", "~/no-such-corpus", "", True),
        ("vertex", "/database/corpus", "", False),
        ("vertex", "/workspace/x", "", False),
        ("vertex", "/tmp/no-such-corpus", "", False),
        ("local", "/data/corpus", "", False),
        ("vm", "/mnt/localssd/x", "", False),
        ("vertex", "/mnt/localssd/x", "", True),
        ("vm", "/data/corpus", "mounts: [{bucket: b-1, path: /data}]\n", False),
        ("vm", "/data/corpus", "mounts: [{bucket: b-1, path: /database}]\n", True),
        # --- HERE/corpus exists here
        ("vertex", "HERE/corpus", "", True),
        ("vm", "HERE/corpus", "", True),
        ("local", "HERE/corpus", "", False),
        ("vertex", "corpus/", "", False),
    ],
)
def test_an_argument_that_names_a_path_which_the_job_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, word: str, more: str, warns: bool
) -> None:
    monkeypatch.setattr(named_paths, "ELSEWHERE", tuple(one for one in named_paths.ELSEWHERE if one != "/tmp"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").touch()
    found = argument_warnings(tmp_path, word.replace("HERE", str(tmp_path)), target=target, more=more)
    assert len(found) == warns


def test_a_path_of_this_machine_that_is_mounted_there_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_paths, "ELSEWHERE", ())
    (tmp_path / "corpus").mkdir()
    here = f"{tmp_path}/corpus"
    assert argument_warnings(tmp_path, here, target="vm")
    assert not argument_warnings(tmp_path, here, target="vm", more=f"mounts: [{{bucket: b-1, path: {here}}}]\n")


def test_a_custom_image_may_have_data(tmp_path: Path) -> None:
    base = "image: {code: src, base: 'a.b/c:1'}\n"
    (tmp_path / "src").mkdir()
    text = f"{HEAD}run: {{script: main.py, args: [/data/corpus]}}\n{base}"
    found = planned(project(tmp_path, text, "src/main.py"))["warnings"]
    assert not [line for line in found if "/data/corpus" in line]


def test_data_in_a_mounted_bucket_is_there_on_a_vm_as_on_vertex_ai(tmp_path: Path) -> None:
    file = spec(tmp_path, "/gcs/bucket/corpus", more="mounts: [{bucket: bucket}]\n")
    planned(file, "--run", target="vm")
    planned(file)
    elsewhere = spec(tmp_path, "/data/corpus", more="mounts: [{bucket: bucket, path: /data}]\n")
    planned(elsewhere, "--run", target="vm")
    assert "job.yaml:5: mounts[0].path: /data is not available on Vertex AI" in refused("vertex", elsewhere)


def test_what_is_ignored_does_not_come_along(tmp_path: Path) -> None:
    file = spec(tmp_path, "text.txt", "text.txt")
    (tmp_path / ".dockerignore").write_text("*.txt\n")
    said = refused("vertex", file)
    assert "It exists, but .gitignore, .dockerignore or its folder's name excludes it." in said
    assert "--in-place" in refused("local", file)
    planned(file, "--in-place", target="local")
    assert "nowhere does not exist in" in refused("local", spec(tmp_path, "nowhere", "a.txt"), "--in-place")


def test_an_image_of_ones_own_may_have_it(tmp_path: Path) -> None:
    planned(spec(tmp_path, "/data/corpus"), "--image", "us-docker.pkg.dev/p/r/i@sha256:" + "a" * 64)


def test_a_share_that_vertex_mounts_has_it(tmp_path: Path) -> None:
    nfs = "vertex: {nfs: [{server: 10.0.0.2, path: /x, mount_point: data}]}\n"
    network = "identity: {network: projects/1/global/networks/n}\n"
    planned(spec(tmp_path, "/mnt/nfs/data/corpus", more=nfs + network))
    assert "does not exist on the job's machine" in refused(
        "vertex", spec(tmp_path, "/mnt/nfs/dat", more=nfs + network)
    )


@pytest.mark.parametrize(("key", "asked"), [("precision", "fp16"), ("precision", "tf32"), ("attention", "cudnn")])
def test_a_rehearsal_without_gpus_refuses_what_only_they_have(
    tmp_path: Path, key: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    file = project(tmp_path, f"{HEAD}run: {{config: {{{key}: {asked}}}}}\n", "other.py")
    ran: Any = launch("local", file, "--output", tmp_path / "out")
    assert ran.code == 2
    assert f"run.config.{key}: {asked} needs a GPU, and this machine has none" in ran.err
    assert not (tmp_path / "out").exists()
    planned(file, target="local")  # a dry run starts nothing here


@pytest.mark.parametrize("target", ["vertex", "vm"])
@pytest.mark.parametrize("path", ["/home/me/runs/one", "../runs/one", "runs/one"])
def test_weights_of_this_machine_are_for_local_runs(tmp_path: Path, target: str, path: str) -> None:
    training = ("--run",) if target == "vm" else ()
    file = spec(tmp_path, f"synthetic, init_from: {path}", "other.py")
    assert f"run.config.init_from: {path}" in refused(target, file, *training)


def test_weights_to_begin_with_are_part_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    given = ("synthetic", *(f"synthetic, init_from: {path}" for path in ("one-0123abcd", "gs://b-1/one", "'hf:o/n'")))
    runs = {planned(spec(tmp_path, one, "other.py"))["run"] for one in given}
    assert len(runs) == len(given)
    planned(spec(tmp_path, f"synthetic, init_from: {tmp_path / 'weights'}", "other.py"), target="local")


# --- Mentions in the arguments and in the code ------------------------------------------------------------------------


TRAIN = """\
import os, helper
from pkg.reading import read
dataset = "shakespeare"
for key in ["batch"]: exec(open("config/char.py").read())
data = open(os.path.join("data", dataset, "train.bin"))
"""


def code_project(folder: Path, run: str, ignore: str, **files: str) -> Path:
    """A spec beside files by name: two underscores are a dot, three a slash."""
    for name, text in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / ".gitignore").write_text(ignore)
    (folder / "job.yaml").write_text(f"{HEAD}run: {run}\n")
    return folder / "job.yaml"


def code_of(spec: Path) -> UserCode:
    files = tuple(collect_code(spec.parent, frozenset([spec])))
    return UserCode(folder=spec.parent, files=files, left_out=("job.yaml",))


def ignored(file: Path) -> list[str]:
    spec, code = read(file), code_of(file)
    return sorted(named_but_ignored(mentioned(spec, code), spec, code))


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
    assert ignored(code_project(tmp_path, run, ignore, **{"train__py": TRAIN, **files})) == expected


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
    file = code_project(tmp_path, run, "", src___main__py=script, configs___a__py="")
    code = code_of(file)
    assert named_outside(mentioned(read(file), code), code.names) == tuple(expected)


def test_the_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a million ignored images does not hold up a dry run."""
    file = code_project(tmp_path, "{script: train.py}", "*.bin\n", train__py=TRAIN, train__bin="")
    for number in range(20):
        (tmp_path / "deep" / str(number)).mkdir(parents=True)
        (tmp_path / "deep" / str(number) / "train.bin").touch()
    assert len(ignored(file)) == 21
    monkeypatch.setattr(named_paths, "MOST_ENTRIES", 5)
    assert ignored(file) == ["train.bin (train.py:5)"]


@pytest.mark.parametrize("target", ["vertex", "local", "vm"])
def test_each_plan_warns(tmp_path: Path, target: str) -> None:
    train = f"{TRAIN}MNIST('../data', download=True)\n"
    file = code_project(
        tmp_path, "{script: train.py}", "*.bin\n", train__py=train, data___train__bin="x", helper__py=""
    )
    more = ("--run",) if target == "vm" else ()

    def warnings(words: str) -> list[str]:
        return [text for text in planned(file, *more, target=target)["warnings"] if words in text]

    (warning,) = warnings("train.bin")
    assert "data/train.bin (train.py:5)" in warning
    (warning,) = warnings("../data")
    assert "../data (train.py:6)" in warning
    (tmp_path / ".gitignore").unlink()
    assert not warnings("train.bin")

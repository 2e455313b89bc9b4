"""What `run.config` reads its data from is where the job runs, or nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.command import launch
from tests.workspace.test_user_functions import planned, project, refused

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
        ("/gcs/bucket/corpus", ()),
        ("synthetic", ()),
        ("{path: python-stdlib, tokenizer: 'tiktoken:gpt2'}", ()),
    ],
)
def test_what_the_job_has(tmp_path: Path, data: str, files: tuple[str, ...]) -> None:
    planned(spec(tmp_path, data, *files))


def test_files_beside_the_spec_are_taken_along_as_code(tmp_path: Path) -> None:
    first = planned(spec(tmp_path, "text.txt", "text.txt"))["run"]
    (tmp_path / "text.txt").write_text("another text")
    assert planned(tmp_path / "job.yaml")["run"] != first


@pytest.mark.parametrize(
    ("target", "data", "words"),
    [
        ("vertex", "text.txt", "run.config.data: text.txt isn't among the code in"),
        ("vertex", "corpse", "gs://BUCKET/"),
        ("vm", "../text.txt", "run.config.data: ../text.txt isn't among the code in"),
        (
            "vertex",
            "/home/me/corpus",
            "/home/me/corpus is no file of the job's machine, which has the code and nothing",
        ),
        ("vertex", "~/corpus", "~/corpus is no file of the job's machine"),
        ("vertex", "/gcs/../etc", "is no file of the job's machine"),
        ("vm", "/gcs/bucket/corpus", "is no file of the job's machine"),
        ("vertex", "{path: synthetic, tokenizer: t.json}", "run.config.data.tokenizer: t.json isn't among the code"),
        ("local", "text.txt", "run.config.data: text.txt isn't among the code in"),
        ("local", "/no/such", "run.config.data: there is no file or folder /no/such on this machine"),
    ],
)
def test_what_it_has_not(tmp_path: Path, target: str, data: str, words: str) -> None:
    training = ("--run",) if target == "vm" else ()
    assert words in refused(target, spec(tmp_path, data, "other.py"), *training)


def test_what_is_ignored_does_not_come_along(tmp_path: Path) -> None:
    file = spec(tmp_path, "text.txt", "text.txt")
    (tmp_path / ".dockerignore").write_text("*.txt\n")
    said = refused("vertex", file)
    assert "It is there, but .gitignore, .dockerignore or its folder's name leaves it out." in said
    assert "--in-place" in refused("local", file)
    planned(file, "--in-place", target="local")
    assert "there is no file or folder nowhere" in refused("local", spec(tmp_path, "nowhere", "a.txt"), "--in-place")


def test_an_image_of_ones_own_may_have_it(tmp_path: Path) -> None:
    planned(spec(tmp_path, "/data/corpus"), "--image", "us-docker.pkg.dev/p/r/i@sha256:" + "a" * 64)


def test_a_share_that_vertex_mounts_has_it(tmp_path: Path) -> None:
    nfs = "vertex: {nfs: [{server: 10.0.0.2, path: /x, mount_point: data}]}\n"
    network = "identity: {network: projects/1/global/networks/n}\n"
    planned(spec(tmp_path, "/mnt/nfs/data/corpus", more=nfs + network))
    assert "no file of the job's machine" in refused("vertex", spec(tmp_path, "/mnt/nfs/dat", more=nfs + network))


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

"""`launch export`: of a run here and in the cloud, to a folder and to a bucket."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from threading import Event

import pytest
import torch

from launch_train import runfolder
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import multipart_writer
from launch_train.checkpointing.manifest import Manifest
from launch_train.common.config import as_data, parse
from launch_train.common.storage import Storage, open_storage
from launcher.testing.googlecloud import Fault, Status
from tests.cli.cloudjobs import Job
from tests.command import Ran, launch

WEIGHT = torch.arange(6.0).reshape(2, 3)


def save(storage: Storage, step: int, **about: float) -> None:
    """A checkpoint with one weight, as one rank writes it."""
    where = runfolder.checkpoint_folder(step, "0001-0000")
    content = {"tensors": {"model/w": WEIGHT * step}, "rest": {"model": {"w": {"$tensor": "model/w"}}}, "own": {}}
    parts = multipart_writer.write_shard(storage, where, 0, content, deadline=time.monotonic() + 60, cancelled=Event())
    facts = {"config": json.loads(json.dumps(as_data(parse({"data": "synthetic"}))))}
    manifests.commit(storage, Manifest(step, "0001-0000", (parts,), {**facts, **about}))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a run of `launch local` in runs/, with checkpoints of steps 10 and 20."""
    folder = tmp_path / "runs" / "tiny-0123abcd"
    for step in (10, 20):
        save(open_storage(str(folder)), step)
    (folder / runfolder.METRICS).mkdir()
    return tmp_path


def exported(here: Path, *argv: str, code: int = 0) -> Ran:
    ran = launch("export", *argv, cwd=here)
    assert ran.code == code, ran.shown
    return ran


def weight(folder: Path) -> float:
    found: torch.Tensor = torch.load(folder / "model.pt", weights_only=True)["w"]
    return found[1, 2].item()


@pytest.mark.parametrize("run", ["tiny", "tiny-0123abcd", "runs/tiny-0123abcd"])
def test_a_run_here_by_any_name(here: Path, run: str) -> None:
    out = exported(here, run, "--format", "torch").out
    folder = here / "tiny-0123abcd-step-20-torch"
    assert weight(folder) == 5 * 20
    assert [line.split()[-1] for line in out.splitlines()] == [f"{folder}/config.json", f"{folder}/model.pt"]


def test_a_step_and_a_folder(here: Path) -> None:
    exported(here, "tiny", "--format", "torch", "--step", "10", "-o", "out/mine")
    assert weight(here / "out" / "mine") == 5 * 10
    assert "not empty" in exported(here, "tiny", "--format", "torch", "-o", "out/mine", code=2).err


def test_the_best_step(here: Path) -> None:
    assert "checkpoint.keep.best" in exported(here, "tiny", "--format", "torch", "--step", "best", code=1).err
    for step, loss in ((30, 2.0), (40, 1.0), (50, 3.0)):
        save(open_storage(str(here / "runs" / "tiny-0123abcd")), step, eval_loss=loss)
    exported(here, "tiny", "--format", "torch", "--step", "best")
    assert weight(here / "tiny-0123abcd-step-40-torch") == 5 * 40


def test_what_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "it has 10, 20" in exported(here, "tiny", "--format", "torch", "--step", "7", code=1).err
    assert "--step" in exported(here, "tiny", "--format", "torch", "--step", "last", code=2).err
    assert "./json" in exported(here, "tiny", "--format", "torch", "-o", "json", code=2).err
    assert "--format" in exported(here, "tiny", code=2).err
    assert "--weights-only" in exported(here, "tiny", "--format", "dcp", code=2).err
    shutil.rmtree(here / "runs" / "tiny-0123abcd" / "checkpoints")
    assert "no checkpoint yet" in exported(here, "tiny", "--format", "torch", code=1).err
    assert [path.name for path in here.iterdir()] == ["runs"]
    monkeypatch.setattr("launcher.runs.exporting.find_spec", lambda _name: None)
    assert "pip install" in exported(here, "tiny", "--format", "torch", code=1).err


def test_a_damaged_part_names_the_object(here: Path) -> None:
    (part,) = (here / "runs" / "tiny-0123abcd").glob("checkpoints/step-00000020/*/*.part")
    part.write_bytes(part.read_bytes()[:-1])
    assert "rank-00000-0000.part is damaged" in exported(here, "tiny", "--format", "torch", code=1).err


def test_of_a_job_on_vertex_to_a_bucket(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    assert "no checkpoint yet" in job.launch("export", run, "--format", "torch", code=1).err
    save(open_storage(f"gs://my-bucket/runs/{run}"), 30)
    out = job.launch("export", f"gs://my-bucket/runs/{run}", "--format", "torch", "-o", "gs://my-bucket/models/a").out
    assert [line.split()[-1] for line in out.splitlines()] == [
        "gs://my-bucket/models/a/config.json",
        "gs://my-bucket/models/a/model.pt",
    ]
    (job.folder / "model.pt").write_bytes(open_storage("gs://my-bucket/models/a").read("model.pt"))
    assert weight(job.folder) == 5 * 30
    assert "not empty" in job.launch("export", run, "--format", "dcp", "-o", "gs://my-bucket/models/a", code=2).err


def test_a_bucket_that_may_not_be_written(here: Path, job: Job) -> None:
    message = "me@example.com does not have storage.objects.create access to the Google Cloud Storage object."
    job.cloud.faults.add(Fault("storage.objects.insert", Status(403, reason="forbidden", message=message)))
    target = "gs://my-bucket/models/b"
    ran = launch("export", "runs/tiny-0123abcd", "--format", "torch", "-o", target, env=job.env, cwd=here)
    assert (ran.code, "storage.objects.create" in ran.err) == (4, True), ran.shown
    assert "gcloud storage buckets add-iam-policy-binding gs://my-bucket" in ran.err.replace("\n", " ")
    assert "reading" not in ran.err, "before the download"


def test_a_failed_upload_leaves_nothing(here: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    message = "Request is prohibited by policy."
    job.cloud.faults.add(Fault("storage.objects.insert", Status(403, message=message), name="model.pt"))
    target = "gs://my-bucket/models/b"
    ran = launch("export", "runs/tiny-0123abcd", "--format", "torch", "-o", target, env=dict(os.environ), cwd=here)
    assert ran.code == 4, ran.shown
    assert open_storage(target).list("") == []

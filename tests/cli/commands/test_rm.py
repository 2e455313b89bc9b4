"""`launch rm`: what is deleted, and what is not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher.services.local.folder_lock import lock_run_folder
from launcher.testing.googlecloud import Fault, Status
from tests.cli.cloudjobs import FULL, RUNS, Job
from tests.cli.flows.test_local_runs import NO_CLOUD, ended, make
from tests.command import Ran, launch

MANIFEST = runfolder.manifest(40, runfolder.start_name(1, 0))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rm(folder: Path, *words: str) -> Ran:
    return launch("rm", *words, cwd=folder, env=NO_CLOUD)


def test_a_local_run_is_deleted_after_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", ended(0))
    (folder / MANIFEST).parent.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    (folder / "model.bin").write_text("a script's own")
    kept = make(tmp_path / "runs" / "kept-0123abcd", ended(0))
    ran = rm(tmp_path, "tiny")
    assert (ran.code, "launch rm tiny --yes" in ran.err) == (2, True)
    for answer, code in (("\n", 1), ("y\n", 0)):
        assert folder.exists()
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        ran = rm(tmp_path, "tiny")
        assert ran.code == code, ran.shown
        assert all(text in ran.err for text in ("step 40", "model.bin", "SUCCEEDED"))
    assert [one.name for one in (tmp_path / "runs").iterdir()] == [kept.name]


def test_several_runs_and_what_an_interrupted_deletion_left(tmp_path: Path) -> None:
    for name in ("tiny-0123abcd", "tiny-0123abcd-2", ".tmp-rm-tiny-0123abcd"):
        make(tmp_path / "runs" / name, ended(1))
    ran = rm(tmp_path, "tiny-0123abcd", "runs/tiny-0123abcd-2", "runs/tiny-0123abcd", "--yes")
    assert (ran.code, ran.out.count(" deleted\n")) == (0, 2), ran.shown
    assert not [*(tmp_path / "runs").iterdir()]


def test_a_running_run_is_not_deleted(tmp_path: Path) -> None:
    folder = make(tmp_path / "runs" / "tiny-0123abcd", None)
    other = make(tmp_path / "runs" / "other-0123abcd", ended(0))
    with lock_run_folder(folder):
        ran = rm(tmp_path, "other", "tiny", "--yes")
    assert (ran.code, "launch cancel tiny-0123abcd" in ran.err) == (2, True)
    assert folder.exists()
    assert other.exists()


def test_a_folder_that_is_no_run_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "project" / "metrics").mkdir(parents=True)
    outer = make(tmp_path / "outer-0123abcd", ended(0))
    make(outer / "inner-0123abcd", ended(0))
    open_storage(str(outer)).write(f"inner-0123abcd/{runfolder.PLAN}", b"{}")
    (tmp_path / "exams" / "attempts").mkdir(parents=True)
    (tmp_path / "exams" / "attempts" / "notes.txt").write_text("not an attempt")
    for name in ("./project", "./outer-0123abcd", "./exams", ".", "/etc"):
        assert rm(tmp_path, name, "--yes").code == 2
    assert (tmp_path / "project" / "metrics").exists()
    assert (outer / "inner-0123abcd" / runfolder.PLAN).exists()


# --- The cloud -------------------------------------------------------------------------------------------------------


def stored(job: Job) -> list[str]:
    """The names in the bucket."""
    return sorted(job.cloud.objects.buckets["my-bucket"])


def test_a_run_in_the_cloud_is_deleted_with_its_folder_and_job(job: Job) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    job.cloud.objects.put("my-bucket", f"runs/{run}/{MANIFEST}", b"{}")
    job.cloud.objects.put("my-bucket", f"runs/{run}-2/plan.json", b"{}")
    job.cloud.objects.put("my-bucket", "runs/other.txt", b"mine")
    ran = job.launch("rm", run, code=2)
    assert all(text in ran.err for text in ("step 40", f"gs://my-bucket/runs/{run}", f"launch rm {run} --yes"))
    assert job.launch("rm", run, "--yes").out == f"{run} deleted\n"
    assert stored(job) == [f"runs/{run}-2/plan.json", "runs/other.txt"]
    assert job.data("runs", "--cloud")["runs"] == []
    assert job.data("vertex", "job.yaml")["run"] == run, "it can be launched again"


def test_an_active_run_in_the_cloud_is_not_deleted(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    before = stored(job)
    assert f"launch cancel {run}" in job.launch("rm", run, "--yes", code=2).err
    assert stored(job) == before
    job.launch("cancel", run)
    listing = Fault("aiplatform.projects.locations.customJobs.list", Status(403), name="us-east4", times=None)
    job.cloud.faults.add(listing)
    assert "may have a job there" in job.launch("rm", run, "--yes", code=2).err
    assert set(stored(job)) >= set(before)


def test_a_folder_of_another_run_stays(job: Job) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    for name in [one for one in stored(job) if one.startswith(f"runs/{run}/")]:
        job.cloud.objects.buckets["my-bucket"].pop(name)
    job.cloud.objects.put("my-bucket", f"runs/{run}/plan.json", json.dumps({"run": "another"}).encode())
    assert "is not the folder of" in job.launch("rm", run, "--yes", code=2).err
    assert stored(job) == [f"runs/{run}/plan.json"]


def test_a_deletion_that_fails_can_be_repeated(job: Job) -> None:
    job.cloud.jobs.script = FULL
    run = job.data("vertex", "job.yaml", code=5)["run"]
    job.cloud.faults.add(Fault("storage.objects.delete", Status(403), after=1, times=1))
    job.launch("rm", run, "--yes", code=2)
    assert f"runs/{run}/plan.json" in stored(job)
    assert job.launch("rm", run, "--yes").code == 0
    assert not stored(job)

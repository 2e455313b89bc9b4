"""`launch local` typed again: it resumes, retries or only shows what is in the run folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launcher.services.local import on_host
from launcher.services.local.folder_lock import lock_run_folder
from launcher.services.local.supervisor import Ended
from tests.command import Ran, launch
from tests.e2e.running import TINY, only_run
from tests.supervised import supervise_here


class World:
    """A folder with a spec. Replicas are not started: a test sets how they end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.spec = folder / "job.yaml"
        self.spec.write_text(TINY)
        self.code = 0
        self.stopped = False
        self.jobs: list[dict[str, str]] = []
        """The environment of each job that was started."""

    def start(self, job: Any, **_: Any) -> Ended:
        self.jobs.append({entry.name: entry.value for entry in job.pools[0].container_spec.env})
        return Ended({"workerpool0-0": self.code}, stopped=self.stopped)

    def launch(self, *argv: str | Path) -> Ran:
        return launch("local", self.spec, "--output", self.output, *argv, cwd=self.folder)

    def attempts(self, run: str | None = None) -> list[str]:
        folder = self.output / run if run else only_run(self.output)
        return sorted(path.name for path in (folder / "attempts").iterdir())

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    supervise_here(monkeypatch)
    monkeypatch.setattr(on_host, "rehearse", made.start)
    return made


def checkpoint(run: Path, step: int, *, complete: bool = True) -> None:
    folder = run / runfolder.checkpoint_folder(step, runfolder.start_name(1, 0))
    folder.mkdir(parents=True)
    (folder / ("manifest.json" if complete else "shard-0")).write_text("{}")


def test_a_finished_run_is_shown_and_not_restarted(world: World) -> None:
    first = world.launch()
    assert (first.code, world.attempts()) == (0, ["0001.end.json", "0001.json"])
    (only_run(world.output) / runfolder.REPORT).write_text("the report of that time")
    before = world.files()
    again = world.launch()
    assert (again.code, len(world.jobs)) == (0, 1)
    assert "launch: this run finished on 20" in again.err
    assert "UTC; nothing to do (--new runs it again)" in again.err
    assert again.out == first.out
    assert world.files() == before


def test_changed_limits_keep_the_run_id(world: World) -> None:
    world.launch()
    assert "nothing to do" in world.launch("--hours", "2", "--set", "limits.restarts=7").err


def test_a_finished_run_is_shown_as_json(world: World) -> None:
    world.launch()
    shown = json.loads(world.launch("-o", "json").out)
    assert shown["exit_codes"] == {"workerpool0-0": 0}
    assert shown["run_folder"] == str(only_run(world.output))


@pytest.mark.parametrize("code", [1, 75, -9])
def test_a_failed_run_is_resumed(world: World, code: int) -> None:
    world.code = code
    assert world.launch().code == 3
    world.code = 0
    again = world.launch()
    assert "launch: attempt 2 of this run; it has no checkpoint yet and starts at step 1\n" in again.err
    assert (again.code, len(world.jobs), "(attempt 2) succeeded in" in again.out) == (0, 2, True)
    assert "nothing to do" in world.launch().err
    assert world.attempts() == ["0001.end.json", "0001.json", "0002.end.json", "0002.json"]


def test_an_interrupted_run_resumes_from_its_newest_complete_checkpoint(world: World) -> None:
    world.code, world.stopped = 75, True
    assert world.launch().code == 3
    run = only_run(world.output)
    assert json.loads((run / runfolder.attempt_end(1)).read_text())["stopped"] == "interrupted"
    checkpoint(run, 80)
    checkpoint(run, 200)
    checkpoint(run, 300, complete=False)
    world.code, world.stopped = 0, False
    assert "attempt 2 of this run; it resumes from its newest checkpoint (step 200)\n" in world.launch().err


def test_no_checkpoint_is_claimed_for_a_custom_script(world: World) -> None:
    (world.folder / "mine.py").write_text("")
    world.spec.write_text("name: mine\nmachine: {type: l4}\nrun: {script: mine.py}\n")
    world.code = 1
    world.launch()
    assert "launch: attempt 2 of this run; its script starts again in the same folder\n" in world.launch().err
    world.code = 0
    world.launch()
    assert "nothing to do" in world.launch().err


def test_a_permanent_failure_is_reported_and_retried(world: World) -> None:
    world.code = 2
    world.launch()
    (only_run(world.output) / runfolder.TERMINAL).write_text("no such data\n")
    again = world.launch()
    assert "launch: the previous attempt failed permanently: no such data\n" in again.err
    assert not (only_run(world.output) / runfolder.TERMINAL).exists()


def test_new_takes_the_first_unused_number(world: World) -> None:
    for _ in range(3):
        assert world.launch("--new").code == 0
    run = min(path.name for path in world.output.iterdir())
    ids = [run, f"{run}-2", f"{run}-3"]
    assert sorted(path.name for path in world.output.iterdir()) == ids
    assert [job[contract.RUN] for job in world.jobs] == ids
    assert [job[contract.RUN_FOLDER] for job in world.jobs] == [str(world.output / one) for one in ids]
    plan = json.loads((world.output / ids[1] / "plan.json").read_text())
    assert plan["attempts"][0]["request"]["labels"]["launch-run"] == ids[1]
    shutil.rmtree(world.output / ids[1] / "attempts")
    world.launch("--new")
    assert world.jobs[-1][contract.RUN] == ids[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--new", "--run-id", "mine"), "--run-id cannot be combined with --new"),
        (("--new", "--dry-run"), "--new cannot be combined with --dry-run"),
        (("--preempt-after", "15s", "--dry-run"), "--preempt-after cannot be combined with --dry-run"),
        (("--preempt-after", "15"), "use for example 15s\n"),
        (("--preempt-after", "soon"), "use for example 15s, 2m or 1h"),
        (("--preempt-after", "0s"), "invalid duration '0s'"),
    ],
)
def test_invalid_flag_combinations_are_refused(world: World, argv: tuple[str, ...], words: str) -> None:
    ran = world.launch(*argv)
    assert (ran.code, ran.out, world.jobs) == (2, "", [])
    assert words in ran.err
    assert not world.output.exists()


def test_new_needs_a_spec(world: World, tmp_path: Path) -> None:
    world.launch()
    ran = launch("local", "--request", only_run(world.output) / "plan.json", "--new", cwd=tmp_path)
    assert (ran.code, len(world.jobs)) == (2, 1)
    assert "--output DIR" in ran.err


def test_a_finished_run_of_another_job_does_not_count(world: World) -> None:
    world.launch("--run-id", "mine")
    assert "attempt 2" in world.launch("--run-id", "mine", "--set", "run.config.steps=13").err
    assert "nothing to do" in world.launch("--run-id", "mine", "--set", "run.config.steps=13").err


def test_a_request_file_is_recognised_by_its_content_and_code(world: World, tmp_path: Path) -> None:
    world.launch()
    plan = only_run(world.output) / "plan.json"
    again = launch("local", "--request", plan, cwd=tmp_path)
    assert (again.code, len(world.jobs)) == (0, 1)
    assert "(--output DIR runs it again)" in again.err
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("")
    argv = ("local", "--request", plan, "--code", tmp_path / "code")
    assert "attempt 2" in launch(*argv).err
    assert "nothing to do" in launch(*argv).err
    (tmp_path / "code" / "a.py").write_text("print()")
    assert "attempt 3" in launch(*argv).err


def test_a_second_process_of_a_running_run_is_refused(world: World) -> None:
    world.code = 1
    world.launch()
    before = world.files()
    with lock_run_folder(only_run(world.output)) as ours:
        assert ours
        for argv in ((), ("--preempt-after", "1s")):
            ran = world.launch(*argv)
            assert (ran.code, ran.out, len(world.jobs)) == (2, "", 1)
            assert "this run is already running on this machine" in ran.err
            assert "--new" in ran.err
    assert world.files() == before
    assert "attempt 2" in world.launch().err


def test_an_end_that_cannot_be_recorded_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has ended: that it did is what counts."""

    def started(*_: Any, **__: Any) -> Ended:
        (only_run(world.output) / "attempts" / "0001.end.json").mkdir()
        return Ended({"workerpool0-0": 0})

    monkeypatch.setattr(on_host, "rehearse", started)
    ran = world.launch()
    assert ran.code == 0
    assert "launch: cannot record how the attempt ended: " in ran.err


def test_an_interruption_after_a_checkpoint_is_reported(world: World) -> None:
    world.code = int(contract.Exit.PREEMPTED)
    ran = world.launch()
    assert "error: the job was stopped: workerpool0-0 exited with 75 (interrupted; checkpoint saved" in ran.err
    assert "The same command resumes from there." in ran.err
    world.code = int(contract.Exit.SUPERSEDED)
    assert "exited with 77 (another start of this run took over)" in world.launch().err


# --- A changed script ------------------------------------------------------------------------------------------------

SCRIPT = """\
name: ck
machine: {type: l4}
image: {code: .}
run: {script: train.py}
"""


def row(run: Path, step: int) -> None:
    """A row of the metrics, as a script writes it."""
    (run / runfolder.METRICS).mkdir()
    (run / runfolder.metrics_part(1, 0, 0, 0)).write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")


@pytest.fixture
def script(world: World) -> World:
    """A script in a folder without other files, that has failed after step 127."""
    world.spec.write_text(SCRIPT)
    world.output = world.folder / "runs"
    (world.folder / "train.py").write_text("print(1)\n")
    world.code = 1
    assert launch("local", world.spec, cwd=world.folder).code == 3
    row(only_run(world.output), 127)
    world.code = 0
    return world


def edit(world: World, text: str = "print(2)\n") -> None:
    """Change the script, a moment after its run began."""
    path, begun = world.folder / "train.py", (only_run(world.output) / runfolder.PLAN).stat().st_mtime
    path.write_text(text)
    os.utime(path, (begun + 1, begun + 1))


def test_resuming_is_suggested_after_the_script_has_changed(script: World) -> None:
    run = only_run(script.output)
    edit(script)
    offer = f"train.py changed since {run.name} (step 127); --resume {run.name} continues it with the new code"
    planned = launch("local", script.spec, "--dry-run", cwd=script.folder)
    assert offer in " ".join(planned.err.replace("launch: ", "").split()), planned.shown
    ran = launch("local", script.spec, cwd=script.folder)
    assert (ran.code, offer in " ".join(ran.err.replace("launch: ", "").split())) == (0, True), ran.shown
    assert len([*script.output.iterdir()]) == 2
    assert "--resume" not in launch("local", script.spec, cwd=script.folder).err, "its own run has begun"


@pytest.mark.parametrize("case", ["unchanged", "succeeded", "no step", "other settings", "new", "running"])
def test_no_run_is_suggested(script: World, case: str) -> None:
    run = only_run(script.output)
    words: list[str] = []
    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if case != "unchanged":
        edit(script)
    if case == "succeeded":
        (run / runfolder.attempt_end(1)).write_text('{"exit_codes": {"a": 0}, "seconds": 1, "time": 1}')
    if case == "no step":
        shutil.rmtree(run / runfolder.METRICS)
    if case == "other settings":
        words = ["--set", "env.LR=0.1"]
    if case == "new":
        words = ["--new"]
    if case == "running":
        lock = lock_run_folder(run)
    with lock:
        assert "--resume" not in launch("local", script.spec, *words, cwd=script.folder).err


def test_a_resume_continues_with_the_new_code(script: World) -> None:
    run = only_run(script.output)
    edit(script)
    ran = launch("local", script.spec, "--resume", "ck", "--set", "env.LR=0.1", cwd=script.folder)
    assert (ran.code, script.attempts()) == (0, ["0001.end.json", "0001.json", "0002.end.json", "0002.json"])
    assert "env.LR: (none) → 0.1" in ran.err
    assert script.jobs[-1][contract.RUN_FOLDER] == str(run)
    assert launch("local", script.spec, "--resume", f"runs/{run.name}", cwd=script.folder).code == 0
    assert len(script.attempts()) == 6, "the spec without that setting is another job again"
    refused = launch("local", "--resume", "ck", cwd=script.folder)
    assert (refused.code, f"launch local SPEC --resume {run.name}" in refused.err) == (2, True)


def test_a_resume_of_the_built_in_trainer_keeps_its_past_steps(world: World) -> None:
    world.code = 1
    world.launch()
    world.code = 0
    run = only_run(world.output)
    moved = run.rename(run.parent.parent / run.name)
    ran = launch("local", "--resume", moved, "--set", "run.config.steps=900", cwd=world.folder)
    assert (ran.code, "steps: " in ran.err) == (0, True), ran.shown
    assert world.jobs[-1][contract.RUN_FOLDER] == str(moved)
    before = sorted(moved.rglob("*"))
    for setting in ("run.config.seed=5", "run.config.batch_size=6"):
        refused = launch("local", world.spec, "--resume", moved, "--set", setting, cwd=world.folder)
        assert (refused.code, setting.partition("=")[0] in refused.err) == (2, True), refused.shown
    assert sorted(moved.rglob("*")) == before


def test_a_run_that_got_more_steps_is_not_continued_with_fewer(world: World) -> None:
    world.launch()
    run = only_run(world.output)
    more = launch("local", world.spec, "--resume", run, "--set", "run.config.steps=900", cwd=world.folder)
    assert more.code == 0, more.shown
    before = sorted(run.rglob("*"))
    ran = launch("local", world.spec, "--output", world.output, cwd=world.folder)
    assert (ran.code, f"--resume {run.name}" in ran.err, "--new" in ran.err) == (2, True, True), ran.shown
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("words", [["--new"], ["--dry-run"], ["--output", "x"], ["--run-id", "x"], ["--request", "x"]])
def test_flags_that_a_resume_excludes(script: World, words: list[str]) -> None:
    ran = launch("local", script.spec, "--resume", "ck", *words, cwd=script.folder)
    assert (ran.code, words[0] in ran.err) == (2, True)
    assert launch("local", script.spec, "--resume", "nothing", cwd=script.folder).code == 2

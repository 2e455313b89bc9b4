"""A sweep on this machine: the order of the points, their GPUs, and the same command repeated."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch_train import runfolder
from launch_train.common.storage import LocalFolder
from launcher.cli.commands.sweep import plan_of
from launcher.cli.options import Flags
from launcher.cli.ui.text import utc_stamp
from launcher.errors import JobFailed, UsageError
from launcher.plan.model import Plan
from launcher.runs import local_run
from launcher.runs.sweep import on_this_machine as sweep_local
from launcher.runs.sweep.events import PointChanged
from launcher.runs.sweep.on_this_machine import LocalSweep, gpu_shares
from launcher.runs.sweep.record import mark_cancelled
from launcher.services.local import client
from launcher.services.local.attempts import End, lock, write_end
from launcher.services.local.client import SupervisorHandle
from launcher.services.local.folder_lock import lock_run_folder
from launcher.services.local.job import Outcome
from launcher.services.local.request import fingerprint, parse_request
from tests.cli.flows.test_local_runs import NO_CLOUD
from tests.command import WORLD, Ran, as_process, launch

SPEC = """\
name: job
machine: {type: l4, gpus: 1}
env: {CODE: "0"}
run: {command: [python, -c, "import os, sys; sys.exit(int(os.environ['CODE']))"]}
limits: {restarts: 0}
"""


class World:
    """A spec. Child processes are not started: a test sets how they end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.active, self.most = folder, 0, 0
        self.started: list[Mapping[str, str]] = []
        self.codes: dict[str, int] = {}
        self.lock = threading.Lock()
        (folder / "job.yaml").write_text(SPEC)

    def sweep(self, values: str = "0,1,2", **options: Any) -> LocalSweep:
        with as_process(["launch"], WORLD, self.folder):
            flags = Flags(set=[f"env.CODE={quoted(values)}"], name=options.pop("name", None))
            plan = plan_of("local", Path("job.yaml"), flags, random=None, seed=0, offline=True)
        return LocalSweep(plan, lambda _: None, environ={}, **options)

    def run_planned(self, plan: Plan, *_: Any, environ: Mapping[str, str], **__: Any) -> None:
        request = parse_request(plan.attempts[0].request)
        value = next(one.value for one in request.pools[0].container_spec.env if one.name == "CODE")
        with self.lock:
            self.started.append({"CODE": value, **environ})
            self.active += 1
            self.most = max(self.most, self.active)
        time.sleep(0.02)
        code = self.codes.get(value, 0)
        storage = LocalFolder(Path(request.run_folder or ""))
        number = lock(storage, {"job": fingerprint(request, "")})
        storage.write(runfolder.PLAN, msgspec.json.encode(plan))
        write_end(storage, number, End(exit_codes={"workerpool0-0": code}, seconds=1.0, time=time.time()))
        with self.lock:
            self.active -= 1
        if code:
            raise JobFailed("it failed")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(sweep_local, "run_planned", made.run_planned)
    monkeypatch.setattr(sweep_local, "TAKEN_SECONDS", 0.05)
    return made


def quoted(values: str) -> str:
    return ",".join(f"'{one}'" for one in values.split(","))


def states(sweep: LocalSweep) -> list[str]:
    return [run.state for run in sweep.runs]


def run(sweep: LocalSweep) -> LocalSweep:
    sweep.run()
    return sweep


def test_one_point_at_a_time_without_gpus(world: World) -> None:
    assert states(run(world.sweep())) == ["succeeded"] * 3
    assert ([one["CODE"] for one in world.started], world.most) == (["0", "1", "2"], 1)


def test_max_parallel(world: World) -> None:
    run(world.sweep("0,1,2,3", max_parallel=2))
    assert world.most == 2


def test_a_failing_point_leaves_the_others_and_is_not_retried(world: World) -> None:
    world.codes = {"1": 70}
    assert states(run(world.sweep())) == ["succeeded", "failed", "succeeded"]
    world.codes = {}
    again = run(world.sweep())
    assert (states(again), len(world.started)) == (["succeeded", "failed", "succeeded"], 3)
    assert "70" in str(again.runs[1].error)
    assert states(run(world.sweep(retry_failed=True))) == ["succeeded"] * 3
    assert len(world.started) == 4


@pytest.mark.parametrize("code", [-15, 143, 75])
def test_a_point_that_was_stopped_runs_again(world: World, code: int) -> None:
    from launch_train.common.contract import Exit

    world.codes = {"1": Exit.PREEMPTED if code == 75 else code}
    run(world.sweep())
    world.codes = {}
    assert states(run(world.sweep())) == ["succeeded"] * 3


def test_changed_code_is_another_sweep(world: World) -> None:
    first = world.sweep(name="search")
    run(first)
    run(world.sweep(name="search"))
    with pytest.raises(UsageError, match="search"):
        run(world.sweep("7,8", name="search"))
    assert world.sweep("7,8").plan.name != world.sweep().plan.name


def test_a_point_that_another_process_runs_is_waited_for(world: World) -> None:
    sweep = world.sweep("0,1")
    folder = Path(sweep.plan.points[0].plan.run_folder or "")
    with lock_run_folder(folder):
        thread = threading.Thread(target=sweep.run)
        thread.start()
        until = time.monotonic() + 20
        while states(sweep) != ["waiting", "succeeded"] and time.monotonic() < until:
            time.sleep(0.01)
        assert states(sweep) == ["waiting", "succeeded"]
    thread.join()
    assert states(sweep) == ["succeeded"] * 2
    assert [one["CODE"] for one in world.started] == ["1", "0"]


def refused(world: World, monkeypatch: pytest.MonkeyPatch, *, before: Callable[[Plan], object]) -> None:
    """The run is refused with a UsageError, after something else has happened."""

    def run_planned(plan: Plan, *_: Any, **__: Any) -> None:
        before(plan)
        raise UsageError("refused")

    monkeypatch.setattr(sweep_local, "run_planned", run_planned)


def test_a_point_that_another_process_has_just_finished_has_not_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(world, monkeypatch, before=lambda plan: world.run_planned(plan, environ={}))
    assert states(run(world.sweep("0,1"))) == ["succeeded"] * 2


def test_a_point_that_was_cancelled_and_is_now_refused_shows_why(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = world.sweep("0,1")
    storage = LocalFolder(Path(sweep.plan.points[0].plan.run_folder or ""))
    storage.write(runfolder.attempt_cancel(lock(storage, {})), b"")
    refused(world, monkeypatch, before=lambda _: None)
    assert states(run(sweep)) == ["failed"] * 2
    assert "refused" in str(sweep.runs[0].error)


def test_ctrl_c_stops_all_points(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.folder / "job.yaml"
    job.write_text(SPEC.replace("import os, sys; sys.exit(int(os.environ['CODE']))", "import time; time.sleep(100)"))
    sweep = world.sweep("0,1", max_parallel=2)
    folders = [Path(point.plan.run_folder or "") for point in sweep.plan.points]
    supervisors: list[SupervisorHandle] = []
    real = client.run_job

    def recorded(*args: Any, on_start: Callable[[SupervisorHandle], object], **options: Any) -> Outcome:
        def started(supervisor: SupervisorHandle) -> None:
            supervisors.append(supervisor)
            on_start(supervisor)

        return real(*args, on_start=started, **options)

    def interrupted(self: LocalSweep) -> None:
        until, locks = time.monotonic() + 30, [folder / runfolder.attempt_lock(1) for folder in folders]
        while not all(lock.exists() for lock in locks) and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_local, "run_planned", local_run.run_planned)
    monkeypatch.setattr(local_run, "run_job", recorded)
    monkeypatch.setattr(LocalSweep, "_take_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert [one.process.wait(20) for one in supervisors] == [0, 0]
    ends = [json.loads((folder / runfolder.attempt_end(1)).read_text()) for folder in folders]
    assert [end["stopped"] for end in ends] == ["interrupted"] * 2


def test_launch_cancel_ends_the_active_point_and_starts_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = world.sweep("0,1,2")

    def until_cancelled(plan: Plan, *_: Any, **__: Any) -> None:
        request = parse_request(plan.attempts[0].request)
        folder = Path(request.run_folder or "")
        with lock_run_folder(folder):
            LocalFolder(folder).write(runfolder.PLAN, msgspec.json.encode(plan))
            number = lock(LocalFolder(folder), {"job": fingerprint(request, "")})
            cancelled, until = folder / runfolder.attempt_cancel(number), time.monotonic() + 30
            while not cancelled.exists() and time.monotonic() < until:
                time.sleep(0.01)
        raise JobFailed("cancelled")

    monkeypatch.setattr(sweep_local, "run_planned", until_cancelled)
    thread = threading.Thread(target=sweep.run)
    thread.start()
    folder = Path(sweep.plan.points[0].plan.run_folder or "")
    while not (folder / runfolder.attempt_lock(1)).exists() and thread.is_alive():
        time.sleep(0.01)
    name = sweep.plan.name
    asked = launch("cancel", name, cwd=world.folder, env=NO_CLOUD)
    assert (asked.code, f"launch cancel {name} --yes" in asked.err) == (2, True)
    ran = launch("cancel", name, "--yes", cwd=world.folder, env=NO_CLOUD)
    thread.join(30)
    assert (ran.code, ran.out.splitlines()) == (
        0,
        [f"{folder.name} cancelled (this machine)", f"{name}: 1 point cancelled"],
    )
    assert states(sweep) == ["cancelled"] * 3
    monkeypatch.setattr(sweep_local, "run_planned", world.run_planned)
    assert states(run(world.sweep("0,1,2"))) == ["succeeded"] * 3, "typed again it continues"


def test_a_point_that_begins_after_launch_cancel_looked_is_cancelled_too(world: World) -> None:
    sweep, seen = world.sweep("0,1"), list[Path]()
    output = LocalFolder(Path(sweep.plan.output))
    sweep._record()
    mark_cancelled(output, sweep.plan.name)
    sweep.runs[0].state = "active"
    folder = Path(sweep.runs[0].point.plan.run_folder or "")
    number = lock(LocalFolder(folder), {})
    with lock_run_folder(folder):
        sweep._obey_cancel()
    seen.append(folder / runfolder.attempt_cancel(number))
    assert seen[0].exists()
    assert states(sweep) == ["active", "cancelled"]


def test_other_commands_and_a_sweeps_name(world: World) -> None:
    world.codes = {"1": 70}
    sweep = run(world.sweep("0,1"))
    name, ids = sweep.plan.name, [one.run for one in sweep.plan.points]

    def typed(*words: str, code: int = 0) -> Ran:
        ran = launch(*words, cwd=world.folder, env=NO_CLOUD)
        assert ran.code == code, ran.shown
        assert "json" in words or max(map(len, ["", *ran.out.splitlines()])) <= 80
        return ran

    page = typed("status", name).out
    assert page.startswith(f"{name}  1 of 2 points succeeded")
    rows = [line.split() for line in page.splitlines()[3:5]]
    assert [[row[0], row[2], row[-1]] for row in rows] == [
        [ids[0], "SUCCEEDED", "CODE=0"],
        [ids[1], "FAILED", "CODE=1"],
    ]
    data = json.loads(typed("status", name, "-o", "json").out)
    assert [(one["run"], one["state"], one["set"]) for one in data["points"]] == [
        (ids[0], "SUCCEEDED", {"env.CODE": "0"}),
        (ids[1], "FAILED", {"env.CODE": "1"}),
    ]
    watched = typed("watch", name, code=3).out
    assert [line.split()[1] for line in watched.splitlines() if line.startswith("job-")] == ["succeeded", "failed"]
    for command in ("logs", "metrics", "follow"):
        error = typed(command, name, code=2).err
        assert f"error: {name} is a sweep of 2 points, not a run" in error
        assert f"launch status {name}" in error
        assert f"launch {command} {ids[0]}" in error
    assert "is a sweep of 2 points" in typed("local", "job.yaml", "--resume", name, code=2).err
    assert "needs a run" in typed("status", name, "--events", code=2).err
    asked = typed("rm", name, code=2).err
    assert all(one in asked for one in ids)
    typed("rm", name, "--yes")
    assert not [path for path in (world.folder / "runs").iterdir() if not path.name.startswith(".")]
    assert "no run" in typed("status", name, code=2).err


def test_a_point_that_has_not_started_has_a_line_too(world: World) -> None:
    sweep = world.sweep("0,1")
    sweep._record()
    ran = launch("status", sweep.plan.name, cwd=world.folder, env=NO_CLOUD)
    assert [line.split()[1:] for line in ran.out.splitlines() if "CODE=" in line] == [
        ["not", "started", "CODE=0"],
        ["not", "started", "CODE=1"],
    ]
    data = json.loads(launch("status", sweep.plan.name, "-o", "json", cwd=world.folder, env=NO_CLOUD).out)
    assert data == {"sweep": sweep.plan.name, "points": [], "not_started": [one.run for one in sweep.plan.points]}


def test_gpus_are_shared_out() -> None:
    def shares(gpus: int, need: int) -> list[str | None]:
        visible = tuple(map(str, range(gpus)))
        return [one.get("CUDA_VISIBLE_DEVICES") for one in gpu_shares(visible, need)]

    assert shares(4, 1) == ["0", "1", "2", "3"]
    assert shares(5, 2) == ["0,1", "2,3"]
    assert shares(1, 1) == [None]
    assert shares(0, 1) == [None]
    assert shares(2, 8) == [None]


def test_events_name_each_start_and_end(world: World) -> None:
    seen: list[PointChanged] = []
    sweep = world.sweep("0,1")
    sweep._on_event = seen.append
    run(sweep)
    assert [(one.run.point.number, one.kind) for one in seen] == [
        (1, "started"),
        (1, "ended"),
        (2, "started"),
        (2, "ended"),
    ]


@pytest.mark.slow
def test_real_processes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    line = ("sweep", "job.yaml", "--to", "local", "--set", "env.CODE='0','3'", "--max-parallel", "2", "-o", "json")
    ran = launch(*line, cwd=tmp_path)
    data = json.loads(ran.out)
    assert (ran.code, [one["state"] for one in data["points"]]) == (0, ["SUCCEEDED", "FAILED"]), ran.shown
    alone = launch("local", "job.yaml", "--set", "env.CODE='0'", cwd=tmp_path)
    assert "nothing to do" in alone.err, "the point is the run that launch local would make"
    report = launch("report", data["sweep"], cwd=tmp_path)
    assert (report.code, report.out.strip()) == (0, f"{data['sweep']}-report.html"), report.shown
    assert "nothing to do" in launch("cancel", data["sweep"], cwd=tmp_path).out
    again = launch(*line[:-2], cwd=tmp_path, env=NO_CLOUD)
    lines = [text for text in again.err.splitlines() if "/2  " in text]
    end = json.loads((tmp_path / "runs" / data["points"][0]["run"] / "attempts" / "0001.end.json").read_text())["time"]
    assert f"already succeeded on {utc_stamp(end)}" in lines[0]
    assert "already failed on " in lines[1]
    assert lines[1].count("workerpool0-0 exited with ") == 1
    assert all(text.startswith(" ") for text in lines), "the time of day is not that of the end"
    plan = json.loads((tmp_path / "runs" / data["points"][0]["run"] / "plan.json").read_text())
    assert plan["spec"]["labels"]["launch-sweep"] == data["sweep"]

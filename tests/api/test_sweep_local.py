"""A sweep on this machine: the order of the points, their GPUs, and the same command repeated."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch_train.common.storage import LocalFolder
from launcher.api import sweep_local
from launcher.api.sweep_events import PointChanged
from launcher.api.sweep_local import LocalSweep, gpu_shares
from launcher.cli.flows.plan_sweep import plan_of
from launcher.cli.options import Flags
from launcher.errors import UsageError
from launcher.rehearsal.attempts import End, lock, write_end
from launcher.rehearsal.folder_lock import lock_run_folder
from launcher.rehearsal.request import fingerprint, parse_request
from tests.command import WORLD, as_process, launch

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

    def run_child(
        self, words: list[str], _on_line: Any, *, environ: Mapping[str, str], on_start: Any
    ) -> tuple[dict[str, Any], int]:
        body = json.loads(Path(words[words.index("--request") + 1]).read_text())
        request = parse_request(body)
        value = next(one.value for one in request.pools[0].container_spec.env if one.name == "CODE")
        with self.lock:
            self.started.append({"CODE": value, **environ})
            self.active += 1
            self.most = max(self.most, self.active)
        time.sleep(0.02)
        code = self.codes.get(value, 0)
        storage = LocalFolder(Path(request.run_folder or ""))
        number = lock(storage, {"job": fingerprint(request, "")})
        write_end(storage, number, End(exit_codes={"workerpool0-0": code}, seconds=1.0, time=time.time()))
        with self.lock:
            self.active -= 1
        return {}, 3 if code else 0


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(sweep_local, "run_child", made.run_child)
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


def test_ctrl_c_stops_all_points(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = world.sweep("0,1", max_parallel=2)
    children: list[subprocess.Popen[bytes]] = []

    def sleeper(*_: Any, environ: Any, on_start: Callable[[Any], None]) -> tuple[dict[str, Any], int]:
        child = subprocess.Popen(["sleep", "100"])
        children.append(child)
        on_start(child)
        return {}, child.wait()

    def interrupted(self: LocalSweep) -> None:
        while len(self._children) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_local, "run_child", sleeper)
    monkeypatch.setattr(LocalSweep, "_take_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert [child.wait(5) for child in children] == [-15, -15]


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
    assert launch("cancel", data["sweep"], cwd=tmp_path).code == 2
    plan = json.loads((tmp_path / "runs" / data["points"][0]["run"] / "plan.json").read_text())
    assert plan["spec"]["labels"]["launch-sweep"] == data["sweep"]

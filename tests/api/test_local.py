"""`api.local`: a plan on this machine, from a notebook or a thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher import api
from launcher.errors import JobFailed, UsageError
from tests.command import WORLD, as_process, launch

SCRIPT = """\
import json, os, pathlib
print("hello from", os.environ["RANK"])
pathlib.Path("left.txt").write_text("x")
raise SystemExit(int(os.environ.get("FAILS", "0")))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(SCRIPT)
    with as_process(["python"], WORLD, tmp_path):
        yield tmp_path


def spec(**changes: Any) -> dict[str, Any]:
    return {"name": "mine", "machine": {"type": "l4", "gpus": 1}, "run": {"script": "mine.py"}, **changes}


@pytest.mark.slow
def test_a_local_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    lines: list[tuple[str, str]] = []
    plan = api.plan(spec(), target="local", folder=folder)
    ended = api.local(plan, on_line=lambda *line: lines.append(line))
    assert (ended.run, ended.folder, ended.exit_codes) == (plan.run, f"{folder}/runs/{plan.run}", {"workerpool0-0": 0})
    assert ("workerpool0-0", "hello from 0") in lines
    results = ended.metrics()
    assert results
    assert (results.rows, [event["event"] for event in results.events]) == ((), ["no_step"])
    assert capfd.readouterr() == ("", "")
    assert handlers == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    assert not (folder / "left.txt").exists()
    lines.clear()
    assert api.local(plan, on_line=lambda *line: lines.append(line)).seconds == ended.seconds
    assert not [text for replica, text in lines if replica != "launch"], "it had succeeded"


@pytest.mark.slow
def test_the_command_finds_the_run_of_the_api(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: mine\nmachine: {type: l4, gpus: 1}\nrun: {script: mine.py}\n")
    ended = api.local(api.plan("job.yaml", target="local"))
    ran = launch("local", "job.yaml", cwd=folder)
    assert "nothing to do" in ran.err, ran.err
    assert ended.run in ran.out


@pytest.mark.slow
def test_a_failed_script(folder: Path) -> None:
    with pytest.raises(JobFailed) as failed:
        api.local(api.plan(spec(env={"FAILS": "7"}), target="local", folder=folder))
    assert failed.value.exit_code == 3
    assert "workerpool0-0 exited with" in failed.value.problem


def test_a_plan_for_the_cloud_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError):
        api.local(api.plan(spec(regions=["us-central1"]), folder=folder))


@pytest.mark.slow
def test_in_threads(folder: Path) -> None:
    plans = [api.plan(spec(env={"N": n}), target="local", folder=folder) for n in "12"]
    with ThreadPoolExecutor(2) as threads:
        assert [one.run for one in threads.map(api.local, plans)] == [plan.run for plan in plans]

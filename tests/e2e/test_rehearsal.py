"""`launch local`: the rendered request, run by real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from launch_train.common.storage import open_storage
from launcher.testing.googlecloud import GoogleCloud
from tests import user_repository
from tests.e2e.running import TINY, losses, only_run, records, run, started, succeeded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def write(folder: Path, **files: str) -> Path:
    """Files by name (a double underscore is a dot); the folder is returned."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_one_node_two_processes_twice_with_the_same_losses(tmp_path: Path) -> None:
    write(tmp_path, job__yaml=TINY)
    for output in ("one", "two"):
        ran = succeeded("local", "job.yaml", "--output", output, cwd=tmp_path)
        assert "succeeded" in ran.stdout
        assert "held-out" in ran.stdout
        assert "[workerpool0-0]" in ran.stderr
    first, second = (only_run(tmp_path / name) for name in ("one", "two"))
    assert len(losses(first)) == 12
    assert losses(first) == losses(second)
    assert losses(first)[-1] < losses(first)[0]
    kinds = {path.name for path in first.iterdir()}
    assert {"plan.json", "spec.yaml", "attempts", "metrics", "checkpoints", "logs"} <= kinds


def test_two_nodes_of_two_processes_compute_the_same(tmp_path: Path) -> None:
    write(tmp_path, job__yaml=TINY)
    ran = succeeded("local", "job.yaml", "--nodes", "2", "--output", "four", cwd=tmp_path)
    assert "[workerpool0-0]" in ran.stderr
    assert "[workerpool1-0]" in ran.stderr
    succeeded("local", "job.yaml", "--gpus", "1", "--output", "one", cwd=tmp_path)
    four, one = (only_run(tmp_path / name) for name in ("four", "one"))
    (end,) = [record for record in records(four) if record.get("event") == "end"]
    assert end["world_size"] == 4
    assert losses(four) == pytest.approx(losses(one), abs=1e-4)


def test_a_users_modules_with_names_like_ours(tmp_path: Path) -> None:
    """They win in both torchrun ranks, their DataLoader workers and their child processes, beside our launch_train."""
    user_repository.write(tmp_path / "code")
    write(tmp_path, job__yaml="name: mine\nmachine: {type: l4}\nimage: {code: code}\nrun: {script: main.py}\n")
    ran = succeeded("local", "job.yaml", "--gpus", "2", "--output", "out", cwd=tmp_path)
    assert ran.stderr.count(user_repository.SAYS) == 2
    assert losses(only_run(tmp_path / "out")) == [0.5]


def test_a_users_program_called_train(tmp_path: Path) -> None:
    write(tmp_path, train__py="print('my own trainer')\n")
    write(tmp_path, job__yaml="name: mine\nmachine: {type: l4}\nrun: {module: train}\n")
    ran = succeeded("local", "job.yaml", "--gpus", "2", "--output", "out", cwd=tmp_path)
    assert ran.stderr.count("my own trainer") == 2


def test_a_script_in_a_subfolder_imports_its_neighbours(tmp_path: Path) -> None:
    write(
        tmp_path / "src", main__py="import helper, other\nprint(helper.MINE, other.MINE)\n", helper__py="MINE = 'a'\n"
    )
    write(tmp_path, other__py="MINE = 'b'\n", helper__py="MINE = 'hidden'\n")
    write(tmp_path, job__yaml="name: sub\nmachine: {type: l4}\nrun: {script: src/main.py}\n")
    ran = succeeded("local", "job.yaml", "--output", "out", cwd=tmp_path)
    assert "[workerpool0-0] a b\n" in ran.stderr


def test_python_launcher_starts_a_script_once_a_node(tmp_path: Path) -> None:
    write(tmp_path, once__py="import os, sys\nprint('once', os.environ.get('WORLD_SIZE'), sys.argv[1:])\n")
    write(
        tmp_path,
        job__yaml="name: keras\nmachine: {type: l4, gpus: 2}\n"
        "run: {script: once.py, launcher: python, args: [--lr, 1e-4]}\n",
    )
    ran = succeeded("local", "job.yaml", "--nodes", "2", "--output", "out", cwd=tmp_path)
    assert ran.stderr.count("once None ['--lr', '1e-4']") == 2


def test_a_request_written_by_hand_is_all_that_counts(tmp_path: Path) -> None:
    """The runner knows nothing but the request: changing its arguments changes what runs."""
    container = {
        "imageUri": "example/none",
        "command": [
            "python",
            "-c",
            "import os, sys; print('ran', sys.argv[1:], os.environ['A'], 'USER' in os.environ)",
        ],
        "args": ["$(A)", "x"],
        "env": [{"name": "A", "value": "1"}],
    }
    request = {"displayName": "by-hand", "jobSpec": {"workerPoolSpecs": [{"containerSpec": container}]}}
    write(tmp_path, request__json=json.dumps(request))
    assert "ran ['1', 'x'] 1 False" in succeeded("local", "--request", "request.json", cwd=tmp_path).stderr
    container["args"] = ["other"]
    write(tmp_path, request__json=json.dumps(request))
    assert "ran ['other'] 1 False" in succeeded("local", "--request", "request.json", cwd=tmp_path).stderr


def test_the_request_of_a_dry_run_runs_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, job__yaml=TINY)
    dry = succeeded("vertex", "job.yaml", "--region", "us-central1", "--dry-run", "-o", "json", cwd=tmp_path)
    request = json.loads(dry.stdout)["attempts"][0]["request"]
    write(tmp_path, plan__json=dry.stdout)
    succeeded("local", "--request", "plan.json", "--output", "out", cwd=tmp_path)
    assert len(losses(tmp_path / "out" / request["displayName"])) == 12


def test_a_failing_script_ends_with_3_and_says_which_and_why(tmp_path: Path) -> None:
    write(tmp_path, bad__py="raise ValueError('bad sample 17')\n")
    write(tmp_path, job__yaml="name: bad\nmachine: {type: l4}\nrun: {script: bad.py}\n")
    ran = run("local", "job.yaml", "--output", "out", cwd=tmp_path)
    assert ran.returncode == 3
    assert ran.stderr.count("ValueError: bad sample 17\n[") == 1  # printed once, though the script was started twice
    assert "workerpool0-0 exited with 1" in ran.stderr
    assert "\nerror: the job failed: ValueError: bad sample 17 (bad.py:1)\nworkerpool0-0 exited with 1\n" in ran.stderr
    assert "torch/distributed" not in ran.stderr  # nothing of torchrun's own


def test_a_users_error_is_told_in_a_line_and_not_tried_again(tmp_path: Path) -> None:
    write(tmp_path, job__yaml=TINY.replace("data: python-stdlib", "data: short.txt"), short__txt="short")
    ran = run("local", "job.yaml", "--output", "out", cwd=tmp_path)
    assert ran.returncode == 3
    assert "exited with 2" in ran.stderr
    assert ran.stderr.count("train: data: short.txt has 5 bytes; block_size") == 1
    assert "Traceback" not in ran.stderr
    assert (only_run(tmp_path / "out") / "terminal").exists()
    again = run("local", "job.yaml", "--output", "out", cwd=tmp_path)  # typed again, it is tried again
    assert "failed permanently" in again.stderr
    assert "exited with 2" in again.stderr


def test_a_run_may_write_to_a_bucket(tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, job__yaml=TINY)
    env = {name: value for name, value in cloud.environ().items() if name.endswith("_OVERRIDES_STORAGE")}
    ran = run("local", "job.yaml", "--output", "gs://my-bucket/runs", cwd=tmp_path, env=env)
    assert ran.returncode == 0, ran.stderr
    assert "folder    gs://my-bucket/runs/tiny-" in ran.stdout
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    kinds = {name.split("/")[1] for name in open_storage("gs://my-bucket/runs").list()}
    assert kinds >= {"attempts", "checkpoints", "logs", "metrics", "plan.json"}


def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    write(tmp_path, job__yaml=TINY.replace("steps: 12", "steps: 100000"))
    process = started("local", "job.yaml", "--nodes", "2", "--gpus", "1", "--output", "out", cwd=tmp_path)
    assert process.stderr
    for line in process.stderr:
        if re.search(r"step +\d+/100000", line):
            break
    mine = descendants(process.pid)
    assert len(mine) >= 6  # two nodes, two torchruns, their workers
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"all processes were stopped; the run folder is {only_run(tmp_path / 'out')}" in err.splitlines()[-3]
    assert re.search(r"local job.yaml .*--resume out/", err.splitlines()[-2])
    assert "    it resumes from its newest checkpoint" in err.splitlines()[-1]
    deadline = time.monotonic() + 30
    while left := [pid for pid in mine if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left


@pytest.mark.parametrize("pool", [0, 1])
def test_a_killed_node_is_restarted_and_the_run_ends_as_if_undisturbed(tmp_path: Path, pool: int) -> None:
    """kill -9 of one replica's whole process tree, as its machine's failure would do it."""
    text = TINY.replace("steps: 12", "steps: 1000").replace("every: 6", "every: 1000")
    text += "    checkpoint: {minutes: 0.02}\n"
    write(tmp_path, job__yaml=text.replace("gpus: 2", "gpus: 1, nodes: 2"))
    succeeded("local", "job.yaml", "--output", "plain", cwd=tmp_path)
    lines, pids = [], list[int]()
    with started("local", "job.yaml", "--output", "killed", cwd=tmp_path) as process:
        for line in process.stderr or ():
            lines.append(line)
            if not pids and re.search(r"step +\d\d\d/1000", line):  # a line a second: two to eight of them by speed
                place = f'"task": {{"type": "workerpool{pool}", "index": 0'
                pids = [pid for pid in descendants(process.pid) if place in environment(pid)]
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, "".join(lines)
    assert pids, "".join(lines)
    killed = [line for line in lines if "was killed" in line]
    assert killed == [f"launch: workerpool{pool}-0 was killed (SIGKILL); restarting it (1 of 5)\n"]
    plain, resumed = (only_run(tmp_path / name) for name in ("plain", "killed"))
    rows = {row["step"]: row["loss"] for row in records(resumed) if "event" not in row}
    assert list(rows.values()) == losses(plain)
    ends = [record for folder in (plain, resumed) for record in records(folder) if record.get("event") == "end"]
    assert ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"]


def environment(pid: int) -> str:
    """The environment of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below one, from /proc."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def test_the_scalars_of_a_summary_writer_are_the_runs_metrics(tmp_path: Path) -> None:
    spec = "name: own\nmachine: {type: l4}\nrun: {script: own.py, launcher: python, metrics: {tensorboard: runs}}\n"
    script = """
import numpy
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("runs/first")
writer.add_scalar("parameters", 1e6)
for step in range(1, 31):
    writer.add_scalar("train/loss", 1 / step, step)
    writer.add_scalars("accuracy", {"val": 0.5, "train": 0.75}, step)
    writer.add_histogram("weights", numpy.arange(9), step)
writer.close()
"""
    write(tmp_path, job__yaml=spec, own__py=script)
    ran = succeeded("local", "job.yaml", "--output", "out", cwd=tmp_path)
    assert "30 steps; last (step 30): loss 0.03333" in ran.stdout
    assert "no event files" not in ran.stderr
    run = only_run(tmp_path / "out")
    rows = json.loads(succeeded("metrics", run, "-o", "json", cwd=tmp_path).stdout)["rows"]
    assert [row["step"] for row in rows] == [*range(1, 31)]
    assert [row["loss"] for row in rows] == pytest.approx([1 / step for step in range(1, 31)])
    assert {name: rows[0][name] for name in rows[0] if name not in ("step", "time", "loss")} == {
        "accuracy": 0.5,
        "accuracy_train/accuracy": 0.75,
    }
    assert "succeeded at step 30" in succeeded("status", run, cwd=tmp_path).stdout
    assert "accuracy" in (run / "report.html").read_text()


def test_a_script_that_does_nothing_and_exits_with_0_is_reported(tmp_path: Path) -> None:
    spec = "name: own\nmachine: {type: l4}\nrun: {script: own.py, launcher: python}\n"
    write(tmp_path, job__yaml=spec, own__py="from launch_train import checkpoint\nprint('unable to locate 2 gpus')\n")
    ran = succeeded("local", "job.yaml", "--output", "out", cwd=tmp_path)
    assert "metrics   none in " in ran.stdout
    assert "warning" not in ran.stdout
    shown = succeeded("status", only_run(tmp_path / "out"), cwd=tmp_path).stdout
    assert "succeeded without a recorded step" in shown
    assert "unable to locate 2 gpus" in shown

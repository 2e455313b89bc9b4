"""Scripts that write checkpoints of their own, and get the arguments to resume from the newest one."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.node.own_checkpoints import Resume, newest_own_checkpoint
from tests.train.nodes import Machines, machines, until

SCRIPT = """
import argparse, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--resume-from-step", type=int, default=0)
parser.add_argument("--resume")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
rank = os.environ.get("RANK", os.environ["LAUNCH_NODE"])
print(f"rank {rank} begins after {options.resume_from_step} with {options.resume}", flush=True)
for step in range(options.resume_from_step + 1, 7):
    if rank == "0":
        (options.out / "new").write_text("state")
        (options.out / "new").rename(options.out / f"model_{step:06d}.pt")
    if step == 3 and "STOP" in os.environ and not options.resume:
        (options.out / f"ready-{rank}").touch()
        time.sleep(100)
"""
ARGS = ("--out", "$(LAUNCH_RUN_PATH)/own")
RESUME = {"glob": "$(LAUNCH_RUN_PATH)/own/model_*.pt", "args": ["--resume-from-step", "{step}", "--resume={path}"]}
ENV = {contract.RESUME: json.dumps(RESUME)}


def touch(folder: Path, name: str, text: str = "state", age: int = 0) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.mark.parametrize(
    ("files", "glob", "expected"),
    [
        (["step_9.pt", "step_10.pt", "step_2.pt"], "step_*.pt", ("step_10.pt", 10)),
        (["model_000100.pt", "model_000020.pt"], "*.pt", ("model_000100.pt", 100)),
        (["epoch1-step30.ckpt", "epoch2-step20.ckpt"], "*.ckpt", ("epoch1-step30.ckpt", 30)),
        (["step_3/model.pt", "step_20/model.pt"], "**/step_{step}/model.pt", ("step_20/model.pt", 20)),
        (["optim_000020_rank1.pt", "optim_000100_rank0.pt"], "optim_{step}_rank*.pt", ("optim_000100_rank0.pt", 100)),
        (["a/step_3.pt", "b/c/step_5.pt"], "**/step_*.pt", ("b/c/step_5.pt", 5)),
        (["weights-3.h5", "weights-12.h5"], "weights-*.h5", ("weights-12.h5", 12)),
        (["checkpoint-3.pth.tar", "last.pth.tar"], "*.pth.tar", ("checkpoint-3.pth.tar", 3)),
        (["ckpt.7", "ckpt.11"], "ckpt.*", ("ckpt.11", 11)),
        (["checkpoint-500/state.pt", "checkpoint-1000/state.pt"], "checkpoint-*", ("checkpoint-1000", 1000)),
        (["last.pt"], "*.pt", ("last.pt", -1)),
        (["last.pt"], "last_{step}.pt", None),
        ([], "own/*.pt", None),
    ],
)
def test_the_newest_checkpoint_has_the_highest_step(
    tmp_path: Path, files: list[str], glob: str, expected: tuple[str, int] | None
) -> None:
    for age, name in enumerate(files):
        touch(tmp_path, name, age=age)
    found = newest_own_checkpoint(f"{tmp_path}/{glob}")
    assert (found and (str(Path(found.path).relative_to(tmp_path)), found.step)) == expected


def test_of_the_same_step_the_file_that_was_written_last_is_the_newest(tmp_path: Path) -> None:
    touch(tmp_path, "run-1/step_5.pt", age=10)
    last = touch(tmp_path, "run-0/step_5.pt", age=5)
    found = newest_own_checkpoint(f"{tmp_path}/run-*/step_*.pt")
    assert found
    assert found.path == str(last)


def test_a_checkpoint_without_a_step_is_none_for_arguments_that_need_one(tmp_path: Path) -> None:
    last = touch(tmp_path, "last.pt")
    assert Resume(f"{tmp_path}/*.pt", ["--step", "{step}", "{path}"]).newest() is None
    resume = Resume(f"{tmp_path}/*.pt", ["--resume={path}"])
    assert (checkpoint := resume.newest())
    assert resume.args_for(checkpoint) == (f"--resume={last}",)


def test_a_checkpoint_that_was_not_written_to_its_end_is_skipped(tmp_path: Path) -> None:
    whole = tmp_path / "step_1.pt"
    with zipfile.ZipFile(whole, "w") as archive:  # as torch.save writes it
        archive.writestr("data.pkl", os.urandom(1000))
    (tmp_path / "step_2.pt").write_bytes(whole.read_bytes()[:700])
    (tmp_path / "step_3.pt").touch()
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_5.pt").symlink_to("nowhere")
    found = newest_own_checkpoint(f"{tmp_path}/step_*")
    assert found
    assert found.path == str(whole)


def test_a_folder_that_cannot_be_read_is_not_taken_for_one_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(_path: str) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr("launch_train.node.own_checkpoints.os.scandir", unreachable)
    with pytest.raises(OSError, match="not connected"):
        newest_own_checkpoint(f"{tmp_path}/step_*.pt")


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(["--script", "work.py"], 2, marks=pytest.mark.slow),
        (["--launcher", "python", "--script", "work.py"], 1),
        pytest.param(["--command", "--", "python", "work.py"], 1, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_script_resumes_from_its_own_newest_checkpoint(one: Machines, options: list[str], ranks: int) -> None:
    one.script(SCRIPT)
    argv = [*options, *(() if "--command" in options else ("--",)), *ARGS]
    env = ENV | {contract.PROCESSES: str(ranks)}
    stopped = one.start(*argv, env=env | {"STOP": "1"})
    ready = [one.run_folder / "own" / f"ready-{rank}" for rank in range(ranks)]
    until(lambda: all(map(Path.exists, ready)) or stopped.process.poll() is not None, "step 3")
    stopped.send(signal.SIGTERM)
    assert stopped.wait() != Exit.OK
    assert "rank 0 begins after 0 with None" in stopped.text
    assert "resum" not in stopped.text
    resumed = one.start(*argv, env=env)
    assert resumed.wait() == Exit.OK, resumed.text
    newest_file = one.run_folder / "own" / "model_000003.pt"
    for rank in range(ranks):
        assert f"rank {rank} begins after 3 with {newest_file}" in resumed.text
    assert f"launch: resuming the script from {newest_file}: --resume-from-step 3" in resumed.text
    assert (one.run_folder / "own" / "model_000006.pt").exists()


@pytest.mark.slow
def test_all_nodes_resume_from_the_checkpoint_that_node_0_sees(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(2)]
    resume = {**RESUME, "glob": "local/model_*.pt"}  # each node's own disk
    with machines(tmp_path, size=2) as pair:
        nodes = []
        for number, folder in enumerate(folders):
            folder.mkdir()
            (folder / "work.py").write_text(SCRIPT)
            pair.folder = folder
            if not number:
                touch(folder, "local/model_000004.pt")
            env = {contract.RESUME: json.dumps(resume), contract.RUN_FOLDER: str(tmp_path / "run")}
            argv = ("--launcher", "python", "--script", "work.py", "--", "--out", "local")
            nodes.append(pair.start(*argv, node=number, env=env))
        assert [node.wait() for node in nodes] == [Exit.OK, Exit.OK], nodes[0].text
        for rank, node in enumerate(nodes):
            assert f"rank {rank} begins after 4 with {folders[0]}/local/model_000004.pt" in node.text


@pytest.mark.slow
def test_new_checkpoints_of_its_own_renew_a_script_s_restarts(one: Machines) -> None:
    one.script(
        """
import os, pathlib, sys
done = int(sys.argv[-1]) if len(sys.argv) > 1 else 0
pathlib.Path(f"step_{done + 1}.pt").write_text("state")
sys.exit(0 if done == 4 else done + 40)
"""
    )
    resume = {"glob": "step_*.pt", "args": ["{step}"]}
    env = {contract.RESUME: json.dumps(resume), contract.RESTARTS: "1"}
    node = one.start("--launcher", "python", "--script", "work.py", env=env)
    assert node.wait() == Exit.OK, node.text
    assert node.text.count("resuming the script from") == 4


def test_the_path_of_a_run_in_a_bucket_needs_the_bucket_as_a_folder(one: Machines) -> None:
    one.script("raise SystemExit('started')")
    env = {contract.RUN_FOLDER: "gs://a-bucket-that-is-no-folder-here/runs/demo-1"}
    node = one.start("--launcher", "python", "--script", "work.py", "--", *ARGS, env=env)
    assert node.wait() == Exit.UNFIT, node.text
    assert "/gcs/a-bucket-that-is-no-folder-here is not mounted" in node.text

"""Command lines and environments of the processes that a node starts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch_train.node.cluster import Cluster
from launch_train.node.command import TORCHRUN, Task, command_line, missing_target, parse_args
from launch_train.node.control_store import GenerationSpec
from launch_train.node.environment import child_env, framework_env, network_env

ORDER = GenerationSpec(generation=4, attempt=2, port=31000, members=("aa", "bb"))
PAIR = Cluster(("host-a:2222", "host-b:2222"), 1)


@pytest.mark.parametrize(
    ("argv", "task"),
    [
        ([], Task("torchrun", "module", "launch_train", ())),
        (["--", "--steps", "3"], Task("torchrun", "module", "launch_train", ("--steps", "3"))),
        (["--module", "a.b", "--", "--module", "x", "--"], Task("torchrun", "module", "a.b", ("--module", "x", "--"))),
        (["--launcher", "python", "--script", "x.py", "a"], Task("python", "script", "x.py", ("a",))),
        (["--command", "--", "make", "-j"], Task("python", "command", "", ("make", "-j"))),
    ],
)  # fmt: skip
def test_the_command_line(argv: list[str], task: Task) -> None:
    assert parse_args(argv) == task


@pytest.mark.parametrize(
    "argv", [["--command"], ["--module", "a", "--script", "b"], ["--launcher", "x"], ["--mod", "a"]]
)
def test_a_wrong_command_line_is_a_users_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 2
    assert "launch_train.node: error" in capsys.readouterr().err


def shown(task: Task, cluster: Cluster) -> str:
    argv = command_line(task, cluster, ORDER, processes=8, run="demo", grace=30.0)
    return " ".join(argv).replace(sys.executable, "PYTHON").replace(TORCHRUN, "TORCHRUN")


def test_torchrun_on_one_node() -> None:
    assert shown(Task("torchrun", "module", "launch_train", ("--a",)), Cluster(("h:1",), 0)) == (
        "PYTHON -P TORCHRUN --nproc-per-node=8 --max-restarts=0 --rdzv-id=demo-2-4"
        " --shutdown-timeout=30 --nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost"
        " -m -- launch_train --a"
    )


def test_torchrun_on_two_nodes_keeps_their_order() -> None:
    assert shown(Task("torchrun", "script", "x.py", ()), PAIR) == (
        "PYTHON -P TORCHRUN --nproc-per-node=8 --max-restarts=0 --rdzv-id=demo-2-4"
        " --shutdown-timeout=30 --nnodes=2 --node-rank=1 --master-addr=host-a --master-port=31000 -- x.py"
    )


def test_without_torchrun() -> None:
    assert shown(Task("python", "module", "a.b", ("c",)), PAIR) == "PYTHON -m a.b c"
    assert shown(Task("python", "script", "x.py", ()), PAIR) == "PYTHON x.py"
    assert shown(Task("python", "command", "", ("make", "x")), PAIR) == "make x"


def test_the_platforms_own_variables_are_left_alone() -> None:
    environ = {"MASTER_ADDR": "a", "RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": "/code"}
    env = child_env(environ, ORDER, 1, gpus=8, code=Path("/workspace"), folder=Path("/x"))
    assert env["PYTHONPATH"].endswith(":/code")
    assert {**env, "PYTHONPATH": "/code"}.items() >= environ.items()
    assert {name: value for name, value in env.items() if name.startswith("LAUNCH_")} == {
        "LAUNCH_ATTEMPT": "2",
        "LAUNCH_GENERATION": "4",
        "LAUNCH_NODE": "1",
        "LAUNCH_VISIBLE_GPUS": "8",
        "LAUNCH_CODE": "/workspace",
        "LAUNCH_EXIT_FILE": "/x/exit",
        "LAUNCH_NOTICE": "/x/notice",
        "LAUNCH_WATCH": "/x/watch",
        "LAUNCH_FAULTS": "/x/faults",
    }


def test_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    assert missing_target(Task("torchrun", "script", "x.py", ()), tmp_path) == ""
    assert missing_target(Task("torchrun", "script", "y.py", ()), tmp_path) == f"y.py: no such file in {tmp_path}"
    assert missing_target(Task("python", "command", "", ("sh", "-c")), tmp_path) == ""
    assert (
        missing_target(Task("python", "command", "", ("no-such-thing",)), tmp_path) == "no-such-thing: no such command"
    )


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("mine", ""),
        ("pkg.deep.work", ""),
        ("torch.distributed.run", ""),
        ("train", ""),
        ("nothing.here", "nothing.here: no module nothing in FOLDER, and none is installed"),
        ("pkg.deep.wrok", "pkg.deep.wrok: no module pkg.deep.wrok in FOLDER, and none is installed"),
        ("mine.work", "mine.work: no module mine.work (mine is not a package) in FOLDER, and none is installed"),
    ],
)
def test_a_module_that_is_missing_is_known_before_it_is_started(tmp_path: Path, module: str, words: str) -> None:
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    (tmp_path / "mine.py").touch()
    (tmp_path / "pkg" / "deep" / "work.py").write_text("raise SystemExit('it is not imported')")
    assert missing_target(Task("torchrun", "module", module, ()), tmp_path) == words.replace("FOLDER", str(tmp_path))


def test_a_script_of_the_image_that_fails_or_is_not_there(tmp_path: Path) -> None:
    script = tmp_path / "nccl.sh"
    environ = {"PATH": "/usr/bin:/bin", "LAUNCH_NCCL_SCRIPT": str(script)}
    assert network_env(environ, rehearsal=False) == (environ, "")
    script.write_text("echo no fabric >&2\nreturn 3\n")
    env, warning = network_env(environ, rehearsal=False)
    assert env == environ
    assert warning == f"{script} failed with code 3 (no fabric): NCCL may be slow"


PYTHON = Task("python", "script", "fit.py", ())


def test_tensorflow_and_jax_find_the_nodes() -> None:
    env = framework_env(PYTHON, PAIR, ORDER, {"TF_CONFIG": "Vertex AI's"})
    workers = {"worker": ["host-a:31000", "host-b:2222"]}  # node 0's 2222 is the control store's
    assert json.loads(env.pop("TF_CONFIG")) == {"cluster": workers, "task": {"type": "worker", "index": 1}}
    assert env == {"JAX_COORDINATOR_ADDRESS": "host-a:31000", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def test_one_node_is_a_worker_by_itself() -> None:
    env = framework_env(PYTHON, Cluster(("h:1",), 0), ORDER, {})
    assert env == {"JAX_COORDINATOR_ADDRESS": "localhost:31000", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}


def test_frameworks_get_nothing_where_it_would_be_wrong() -> None:
    assert framework_env(replace(PYTHON, launcher="torchrun"), PAIR, ORDER, {}) == {}
    assert framework_env(PYTHON, Cluster(("host:2222", ""), 0), ORDER, {}) == {}  # the others' hosts are not known
    own = framework_env(PYTHON, PAIR, ORDER, {"JAX_COORDINATOR_ADDRESS": "h:1"})
    assert own.keys() == {"TF_CONFIG"}


def test_torchrun_starts_under_python_3_10_which_has_no_safe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def torchrun() -> list[str]:
        return command_line(Task("torchrun", "script", "x.py", ()), PAIR, ORDER, processes=2, run="r", grace=10)

    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    assert torchrun()[1:3] == ["-P", TORCHRUN]
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert torchrun()[1] == TORCHRUN

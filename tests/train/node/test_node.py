"""launch_train.node on one machine, as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common.contract import Exit
from tests.train.node.test_notify import Hook
from tests.train.nodes import REPOSITORY, Machines, cluster_spec, machines, until


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


FAILS = (
    "import os; g = os.environ['LAUNCH_GENERATION']; print('generation', g, flush=True); raise SystemExit(5 + int(g))"
)
WAITS = "import time; print('waiting', flush=True); time.sleep(100)"


def python(script: str) -> tuple[str, ...]:
    return ("--launcher", "python", "--script", script)


def test_torchrun_starts_a_process_for_each_gpu_asked_for(one: Machines) -> None:
    script = one.script(
        "import os, sys\n"
        "names = 'RANK LOCAL_RANK WORLD_SIZE LAUNCH_ATTEMPT LAUNCH_GENERATION LAUNCH_NODE TORCHELASTIC_RUN_ID'\n"
        "print(*[os.environ[name] for name in names.split()], *sys.argv[1:])\n"
    )
    # abbreviations of torchrun's own options, one of them, and what argparse itself takes
    args = ["--run=dummy", "--logs", "-h", "--shutdown-timeout=5", "--", "--nnodes", "7", "-m", "--"]
    node = one.start("--script", script, "--", *args, env={"LAUNCH_PROCESSES": "2"})
    assert node.wait() == Exit.OK, node.text
    assert "OMP_NUM_THREADS" not in node.text
    lines = sorted(line for line in node.text.splitlines() if "demo-1" in line)
    assert lines == [f"{rank} {rank} 2 1 0 0 demo-1-1-0 {' '.join(args)}" for rank in (0, 1)]


def test_a_failing_script_is_started_again_as_often_as_allowed(one: Machines) -> None:
    node = one.start(*python(one.script(FAILS)), env={"LAUNCH_RESTARTS": "2"})
    assert node.wait() == Exit.FAILED
    assert re.findall(r"^generation (\d)", node.text, re.M) == ["0", "1", "2"]
    assert "exit code 7; failed 3 times without a new checkpoint" in (one.run_folder / "terminal").read_text()


def test_what_fails_twice_before_its_first_step_is_not_started_again(one: Machines) -> None:
    one.script(
        "import os\n"
        "print('generation', os.environ['LAUNCH_GENERATION'], 'LAUNCH_NOTIFY' in os.environ)\n"
        "raise SystemExit(5)"
    )
    with Hook() as hook:
        told = {"webhook": hook.url, "on": ["failed", "finished"]}
        node = one.start("--script", "work.py", env={"LAUNCH_NOTIFY": json.dumps(told)})
        assert node.wait() == Exit.FAILED
    assert [body["event"] for body in hook.bodies] == ["failed"]
    assert "not retrying" in hook.bodies[0]["cause"]
    assert "True" not in node.text  # the URL is for the node alone
    assert re.findall(r"^generation (\d)", node.text, re.M) == ["0", "1"]
    hopeless = "failed twice before its first step; not retrying"
    assert hopeless in (one.run_folder / "terminal").read_text()


@pytest.mark.slow
def test_what_fails_alike_after_steps_without_a_word_is_started_again(one: Machines) -> None:
    one.script(
        "import os; from launch_train import metrics; print('generation', os.environ['LAUNCH_GENERATION']); "
        "metrics.log(1, loss=2.0); raise SystemExit(5)"
    )
    node = one.start("--script", "work.py", env={"LAUNCH_RESTARTS": "2"})
    assert node.wait() == Exit.FAILED
    assert re.findall(r"^generation (\d)", node.text, re.M) == ["0", "1", "2"]


def test_a_new_checkpoint_starts_the_count_again(one: Machines) -> None:
    script = one.script(
        "import os, pathlib\n"
        "generation = int(os.environ['LAUNCH_GENERATION'])\n"
        "step = pathlib.Path(os.environ['LAUNCH_RUN_FOLDER'], 'checkpoints', f'step-{min(generation + 1, 4):08d}')\n"
        "start = step / f'0001-{generation:04d}'\n"
        "start.mkdir(parents=True)\n"
        "(start / 'manifest.json').write_text('{}')\n"
        "print('generation', generation)\n"
        "raise SystemExit(1)\n"
    )
    node = one.start(*python(script), env={"LAUNCH_RESTARTS": "1"})
    assert node.wait() == Exit.FAILED
    # 0 to 3 each made a new step; 4 made the same one again, which is nothing new: the second failure in a row.
    assert re.findall(r"^generation (\d)", node.text, re.M) == ["0", "1", "2", "3", "4"]


def test_a_repaired_failure_ends_well(one: Machines) -> None:
    script = one.script("import os; raise SystemExit(os.environ['LAUNCH_GENERATION'] == '0')")
    node = one.start(*python(script))
    assert node.wait() == Exit.OK
    assert "node 0: exit code 1; restarting (1 of 3" in node.text
    assert not (one.run_folder / "terminal").exists()


def test_a_users_error_is_not_tried_again_and_torchrun_does_not_hide_it(one: Machines) -> None:
    script = one.script(
        "import os\n"
        "print('generation', os.environ['LAUNCH_GENERATION'])\n"
        "open(os.environ['LAUNCH_EXIT_FILE'], 'a').write('2\\n')\n"
        "os._exit(2)\n"
    )
    node = one.start("--script", script)
    assert node.wait() == Exit.USAGE, node.text
    assert re.findall(r"^generation (\d)", node.text, re.M) == ["0"]
    assert "exit code 2" not in node.text.rpartition("launch: node 0")[0]  # it has said why; torchrun needn't
    assert "Traceback" not in node.text
    assert "torch/distributed" not in node.text
    assert "invalid config or code" in (one.run_folder / "terminal").read_text()


def test_a_terminal_run_is_not_started(one: Machines) -> None:
    one.run_folder.mkdir()
    (one.run_folder / "terminal").write_text("lr must be above 0\n")
    node = one.start(*python(one.script(FAILS)))
    assert node.wait() == Exit.TERMINAL
    assert node.text == "launch: an earlier attempt failed permanently: lr must be above 0 (exit code 78)\n"


def test_generations_go_on_where_the_last_container_stopped(one: Machines) -> None:
    (one.run_folder / "attempts").mkdir(parents=True)
    for name in ("0001.json", "0002.json", "0001.generation"):
        (one.run_folder / "attempts" / name).write_text("7")
    (one.run_folder / "attempts" / "0002.generation").write_text("4\n")
    node = one.start("--command", "--", "sh", "-c", "echo $LAUNCH_ATTEMPT-$LAUNCH_GENERATION")
    assert node.wait() == Exit.OK
    assert "2-5\n" in node.text


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_command_and_leaves_nothing(one: Machines, signum: int, code: int) -> None:
    script = one.script(
        "import signal, subprocess, sys, time\n"
        "def told(number, frame):\n"
        "    print('told', number, flush=True)\n"
        "    sys.exit(0)\n"
        "for number in (2, 15):\n"
        "    signal.signal(number, told)\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print('waiting', flush=True)\n"
        "time.sleep(100)\n"
    )
    node = one.start(*python(script))
    node.await_text("waiting")
    node.send(signum)
    # The script says 0, but nothing says that its work was done.
    assert node.wait() == code
    assert node.text.count(f"told {int(signum)}") == 1
    assert one.left_over() == []


def test_a_signal_ends_torchrun_and_its_workers(one: Machines) -> None:
    node = one.start("--script", one.script(WAITS), env={"LAUNCH_PROCESSES": "2"})
    until(lambda: node.text.count("waiting") == 2, "both workers")
    assert any("--shutdown-timeout=23 " in line for line in one.left_over())  # less than the node's own 25 s
    node.send(signal.SIGTERM)
    assert node.wait() == 143, node.text
    assert one.left_over() == []


@pytest.mark.parametrize(("mark", "code"), [(75, 75), (0, 0)])
def test_after_a_signal_the_processes_own_word_counts(one: Machines, mark: int, code: int) -> None:
    script = one.script(
        "import os, signal, sys, time\n"
        "def told(number, frame):\n"
        f"    open(os.environ['LAUNCH_EXIT_FILE'], 'a').write('{mark}\\n')\n"
        f"    os._exit({mark})\n"
        "signal.signal(15, told)\n"
        "print('waiting', flush=True)\n"
        "time.sleep(100)\n"
    )
    node = one.start(*python(script))
    node.await_text("waiting")
    node.send(signal.SIGTERM)
    assert node.wait() == code
    assert not (one.run_folder / "terminal").exists()


def test_who_does_not_listen_is_killed(one: Machines) -> None:
    script = one.script("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + WAITS)
    node = one.start(*python(script), timing={"grace": 0.3})
    node.await_text("waiting")
    node.send(signal.SIGTERM)
    assert node.wait() == 143
    assert one.left_over() == []


def test_a_killed_node_takes_its_processes_along(one: Machines) -> None:
    node = one.start(*python(one.script(WAITS)))
    node.await_text("waiting")
    node.send(signal.SIGKILL)
    node.wait()
    until(lambda: one.left_over() == [], "the script's end", limit=5)


@pytest.mark.slow
def test_workers_of_a_killed_torchrun_do_not_stay(one: Machines) -> None:
    script = one.script(
        "import os, signal, time\n"
        "if os.environ['LAUNCH_GENERATION'] == '0':\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(100)\n"
    )
    node = one.start("--script", script)
    assert node.wait() == Exit.OK, node.text
    assert "killed by SIGKILL; restarting" in node.text
    assert one.left_over() == []


def test_lines_of_ranks_that_share_a_pipe_are_whole(one: Machines) -> None:
    one.script("import os; os.environ['BEHIND'] = 'kept'", "sitecustomize.py")
    script = one.script(
        "import os, pathlib, sys, time\n"
        "pathlib.Path('rank' + os.environ['RANK']).touch()\n"
        "while not all(os.path.exists(f'rank{rank}') for rank in (0, 1)): time.sleep(0.001)\n"
        "for i in range(5000):\n"
        "    print('rank', os.environ['RANK'] * 20, os.environ['BEHIND'], file=(sys.stdout, sys.stderr)[i % 2])\n"
    )
    path = f"{one.folder}:{REPOSITORY}"
    node = one.start("--script", script, env={"LAUNCH_PROCESSES": "2", "PYTHONPATH": path})
    assert node.wait() == Exit.OK, node.text
    lines = [line for line in node.text.splitlines() if "rank" in line]
    assert len(lines) == 10000
    assert set(lines) == {f"rank {str(rank) * 20} kept" for rank in (0, 1)}


def test_the_script_of_the_image_sets_nccl_up(one: Machines) -> None:
    one.script("export NCCL_ALGO=Ring\nexport LD_LIBRARY_PATH=/image\nexport ODD=$'two\\nlines'\n", "nccl.sh")
    node = one.start(
        *("--command", "--", "sh", "-c", 'echo "$NCCL_ALGO $LD_LIBRARY_PATH [$ODD]"'),
        env={"LAUNCH_NCCL_SCRIPT": str(one.folder / "nccl.sh"), "LAUNCH_LIBRARY_PATH": "/plugin/lib:/plugin/lib64"},
    )
    assert node.wait() == Exit.OK
    assert "Ring /plugin/lib:/plugin/lib64:/image [two\nlines]\n" in node.text


def test_a_rehearsal_has_not_the_clouds_network(one: Machines) -> None:
    one.script("export NCCL_ALGO=Ring\n", "nccl.sh")
    node = one.start(
        *("--command", "--", "sh", "-c", 'echo "[$NCCL_ALGO$NCCL_PROTO$LD_LIBRARY_PATH] $NCCL_DEBUG"'),
        env={
            "NCCL_PROTO": "Simple",
            "NCCL_DEBUG": "WARN",
            "LAUNCH_LIBRARY_PATH": "/plugin",
            "LAUNCH_NCCL_SCRIPT": str(one.folder / "nccl.sh"),
            "CLUSTER_SPEC": cluster_spec(1, 0, one.port),
        },
    )
    assert node.wait() == Exit.OK
    assert "[] WARN\n" in node.text
    assert node.text.count("launch: local run: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_the_users_code_is_found_and_hides_nothing_of_pythons(one: Machines, launcher: str) -> None:
    for name in ("queue.py", "random.py", "tempfile.py"):
        one.script("raise RuntimeError('hidden')", name)
    one.script("MINE = 'found'", "helper.py")
    one.script("import queue, random, torch, helper, sys; print('helper', helper.MINE, queue.Queue)")
    node = one.start("--launcher", launcher, "--script", "work.py", env={"PYTHONSAFEPATH": "1"})
    assert node.wait() == Exit.OK, node.text
    assert "helper found <class 'queue.Queue'>" in node.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ("--launcher", "torchrun", "--script", "src/main.py"),
        ("--launcher", "python", "--script", "src/main.py"),
        ("--script", "link.py"),
        ("--command", "--", "python", "src/main.py"),
        ("--command", "--", "torchrun", "--nproc-per-node=1", "--standalone", "src/main.py"),
        ("--command", "--", "python", "-c", "import subprocess; subprocess.check_call(['python', 'src/main.py'])"),
    ],
)
def test_a_script_in_a_subfolder_finds_its_neighbours_and_then_the_code(one: Machines, how: tuple[str, ...]) -> None:
    (one.folder / "src").mkdir()
    one.script("import helper, other, queue, sys; print('found', helper.MINE, other.MINE)", "src/main.py")
    one.script("MINE = 'beside the script'", "src/helper.py")
    one.script("raise RuntimeError('hidden')", "src/queue.py")
    one.script("raise RuntimeError('hidden')", "helper.py")
    one.script("MINE = 'of the code'", "other.py")
    (one.folder / "link.py").symlink_to("src/main.py")
    env = {"PYTHONSAFEPATH": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    node = one.start(*how, env=env)
    assert node.wait() == Exit.OK, node.text
    assert "found beside the script of the code" in node.text


def test_only_scripts_of_the_code_have_their_folder_on_the_path(
    one: Machines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """torchrun's own script lies in our package, and programs in the environment's bin."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tool.py"
    elsewhere.write_text("import sys; print('path', sys.path)")
    node = one.start("--command", "--", sys.executable, str(elsewhere), env={"PYTHONSAFEPATH": "1"})
    assert node.wait() == Exit.OK, node.text
    assert str(one.folder) in node.text
    assert str(elsewhere.parent) not in node.text


def test_what_nobody_foresaw_is_one_line_too(one: Machines) -> None:
    one.run_folder.mkdir()
    (one.run_folder / "terminal").write_bytes(b"\xff")
    node = one.start(*python(one.script("")))
    assert node.wait() == Exit.FAILED
    assert node.text.startswith("launch: node 0: UnicodeDecodeError: ")
    assert node.text.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "env", "line"),
    [
        (("--script", "nowhere.py"), {}, "nowhere.py: no such file"),
        (("--command", "--", "no-such-command"), {}, "no-such-command: no such command"),
        (("--script", "work.py"), {"LAUNCH_PROCESSES": "two"}, "LAUNCH_PROCESSES='two' must be a whole number from 1"),
        (("--script", "work.py"), {"LAUNCH_RESTARTS": "-1"}, "LAUNCH_RESTARTS='-1' must be a whole number from 0"),
        (("--script", "work.py"), {"LAUNCH_GPU": "["}, "LAUNCH_GPU is not JSON"),
        (("--script", "work.py"), {"CLUSTER_SPEC": "{"}, "CLUSTER_SPEC is not JSON"),
    ],
)
def test_what_can_not_work_is_said_in_one_line(
    one: Machines, argv: tuple[str, ...], env: dict[str, str], line: str
) -> None:
    one.script("")
    node = one.start(*argv, env=env)
    assert node.wait() == Exit.USAGE
    assert node.text.startswith("launch: ")
    assert line in node.text
    assert node.text.count("\n") == 1, node.text
    # A wrong CLUSTER_SPEC may be this replica's alone; all else is wrong on every machine.
    assert (one.run_folder / "terminal").exists() == ("CLUSTER_SPEC" not in env)


def test_a_reduction_server_is_not_a_node(one: Machines) -> None:
    pools = {"workerpool0": ["a:2222"], "workerpool2": ["r:2222"]}
    spec = {"cluster": pools, "environment": "cloud", "task": {"type": "workerpool2", "index": 0}}
    node = one.start(*python(one.script(FAILS)), env={"CLUSTER_SPEC": json.dumps(spec)})
    assert node.wait() == Exit.USAGE
    assert "this replica is a reduction server (workerpool2), not a node" in node.text
    assert not one.run_folder.exists()


def test_one_node_needs_no_torch(one: Machines) -> None:
    work = "main(['--command', '--', 'true']); print('torch' in sys.modules)"
    code = f"import sys; from launch_train.node.__main__ import main; {work}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_in_the_cloud_a_missing_gpu_is_the_end(one: Machines) -> None:
    spec = {"cluster": {"workerpool0": ["a:2222"]}, "environment": "cloud", "task": {"type": "workerpool0", "index": 0}}
    gpu = json.dumps({"name": "NVIDIA H100", "min_driver": "525"})
    hidden = {"LAUNCH_GPU": gpu, "LAUNCH_PROCESSES": "2", "CUDA_VISIBLE_DEVICES": ""}
    node = one.start(*python(one.script("")), env=hidden | {"CLUSTER_SPEC": json.dumps(spec)})
    assert node.wait() == Exit.UNFIT
    assert "found 0 of 2 GPUs (NVIDIA H100)" in node.text
    rehearsal = one.start(*python("work.py"), env=hidden)
    assert rehearsal.wait() == Exit.OK
    assert "found 0 of 2 GPUs (NVIDIA H100); continuing on CPU" in rehearsal.text


def test_a_run_folder_that_can_not_be_written_is_said_before_anything_starts(one: Machines) -> None:
    (one.folder / "file").write_text("")
    node = one.start(*python(one.script("")), env={"LAUNCH_RUN_FOLDER": str(one.folder / "file" / "run")})
    assert node.wait() == Exit.UNFIT
    assert node.text.count("\n") == 1, node.text

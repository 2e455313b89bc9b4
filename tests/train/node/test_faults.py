"""Failures that no restart can repair, and how often a failure is printed: real processes under launch_train.node."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from launch_train.common import faults
from launch_train.common.contract import Exit
from launch_train.common.faults import Fault
from launch_train.node.exit_status import Outcome, recurring_fault
from tests.train.material import USUAL
from tests.train.nodes import Machines, Node, machines

GENERATION = "import os, sys; print('generation', os.environ['LAUNCH_GENERATION'], flush=True)\n"
STEPS = (
    "from launch_train import metrics\n"
    "for step in range(1, 10):\n"
    "    if step > {limit}:\n"
    "        raise {error}\n"
    "    metrics.log(step, loss=1.0)\n"
)
PYTHON = ("--launcher", "python", "--script", "work.py")
MODULE = ("--launcher", "python", "--module", "work")
COMMAND = ("--command", "--", "python", "work.py")
RANKS = {"LAUNCH_PROCESSES": "2"}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


def generations(node: Node) -> str:
    """The numbers of the starts, each once."""
    return "".join(dict.fromkeys(re.findall(r"^generation (\d)", node.text, re.M)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "error", "starts"),
    [
        ("7", "ZeroDivisionError('division by zero')", "01"),
        ("3 + int(os.environ['LAUNCH_GENERATION'])", "ZeroDivisionError('division by zero')", "012"),  # another step
        ("7", "RuntimeError('[gloo/tcp.cc] Connection closed by peer [127.0.0.1]:1')", "012"),
    ],
)
def test_the_same_exception_at_the_same_step_and_place_is_not_retried(
    one: Machines, limit: str, error: str, starts: str
) -> None:
    one.script(GENERATION + STEPS.format(limit=limit, error=error))
    node = one.start(*PYTHON, env={"LAUNCH_RESTARTS": "2"})
    assert node.wait() == Exit.FAILED
    assert generations(node) == starts
    assert ("work.py:5" in (one.run_folder / "terminal").read_text()) == (starts == "01")


def test_the_same_exception_at_another_place_is_retried(one: Machines) -> None:
    one.script(GENERATION + "if os.environ['LAUNCH_GENERATION'] == '1':\n    int('x')\nint('x')\n")
    node = one.start(*PYTHON, env={"LAUNCH_RESTARTS": "2"}, timing={"quick": 0.0})
    assert node.wait() == Exit.FAILED
    assert generations(node) == "012"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "text", "words"),
    [
        (PYTHON, "import argparse; argparse.ArgumentParser().parse_args(['--wrong'])", "arguments: --wrong"),
        (PYTHON, "def f(:\n", "SyntaxError"),
        (PYTHON, "import broken", "broken.py:1"),
        (PYTHON, "from json import nothing", "ImportError: cannot import name 'nothing'"),
        (MODULE, "import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (COMMAND, "import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (COMMAND, "def f(:\n", "SyntaxError"),
    ],
)
def test_what_can_not_start_is_not_retried_once(one: Machines, argv: tuple[str, ...], text: str, words: str) -> None:
    one.script("print('generation', 0); def f(:\n", "broken.py")
    one.script(text if text.startswith("def") else GENERATION + text)
    node = one.start(*argv)
    assert node.wait() == Exit.USAGE, node.text
    assert "restarting" not in node.text
    assert words in node.text
    assert node.text.count("Traceback") <= 1
    assert (one.run_folder / "terminal").exists()


def test_a_command_that_exits_with_2_after_a_while_is_retried(one: Machines) -> None:
    argv = ("--command", "--", "sh", "-c", "echo generation $LAUNCH_GENERATION; exit 2")
    node = one.start(*argv, env={"LAUNCH_RESTARTS": "1"}, timing={"quick": 0.0})
    assert node.wait() == Exit.FAILED
    assert generations(node) == "01"


def test_who_exits_with_2_because_of_a_signal_may_start_again(one: Machines) -> None:
    one.script(
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: sys.exit(2))\n"
        "print('waiting', flush=True)\n"
        "time.sleep(100)\n"
    )
    node = one.start(*PYTHON)
    node.await_text("waiting")
    node.send(15)
    assert node.wait() == 143
    assert not (one.run_folder / "terminal").exists()


def test_an_import_that_fails_for_want_of_a_native_library_may_work_elsewhere(one: Machines) -> None:
    one.script(GENERATION + "raise ImportError('libcuda.so.1: cannot open shared object file: No such file')")
    node = one.start(*PYTHON)
    assert node.wait() == Exit.FAILED
    assert generations(node) == "01"


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("--script", "work.py"), PYTHON])
def test_what_a_subprocess_fails_with_is_the_scripts_own_business(one: Machines, argv: tuple[str, ...]) -> None:
    probe = "import subprocess; subprocess.run([sys.executable, '-c', 'import nothing_of_this_name'])\n"
    one.script(GENERATION + probe + "raise ValueError(os.environ['LAUNCH_GENERATION'])")
    node = one.start(*argv, env={"LAUNCH_RESTARTS": "1"}, timing={"quick": 0.0})
    assert node.wait() == Exit.FAILED
    assert generations(node) == "01"


@pytest.mark.slow
def test_ranks_and_restarts_that_fail_alike_print_one_traceback(one: Machines) -> None:
    one.script(
        GENERATION + "import pathlib, time\n"
        "start = os.environ['LAUNCH_GENERATION']\n"
        "pathlib.Path(f'{start}-' + os.environ['RANK']).touch()\n"
        "while not all(os.path.exists(f'{start}-{rank}') for rank in (0, 1)): time.sleep(0.001)\n"
        "raise ValueError('of rank ' + os.environ['RANK'])\n"
    )
    node = one.start("--script", "work.py", env=RANKS, timing={"quick": 0.0})
    assert node.wait() == Exit.FAILED
    assert node.text.count("Traceback") == 1
    assert len(re.findall(r"ranks? (0 )?failed( alike)?: ValueError: of rank 0 \(work\.py:6\)", node.text)) >= 2
    assert "exit code 1\n" not in node.text.replace("(exit code 1)", "")


@pytest.mark.slow
def test_ranks_that_lose_a_failed_peer_print_no_traceback(one: Machines) -> None:
    one.script(
        GENERATION + "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('mine')\n"
        "dist.barrier()\n"
    )
    node = one.start("--script", "work.py", env={**RANKS, "LAUNCH_RESTARTS": "0"})
    assert node.wait() == Exit.FAILED
    assert node.text.count("Traceback") == 1
    assert "[rank1]: ValueError: mine\n" in node.text
    assert node.text.count("rank 1 failed: ValueError: mine (work.py:5)") == 1


@pytest.mark.slow
def test_nodes_that_fail_alike_print_one_traceback(tmp_path: Path) -> None:
    with machines(tmp_path, size=2) as both:
        both.script(
            GENERATION + "import torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "dist.barrier()\n"
            "raise ValueError('everywhere')\n"
        )
        once = {"LAUNCH_RESTARTS": "0"}
        nodes = [both.start("--script", "work.py", node=number, env=once) for number in (0, 1)]
        assert [node.wait() for node in nodes] == [Exit.FAILED, Exit.FAILED]
        assert sum(node.text.count("Traceback") for node in nodes) == 1
        assert all("failed: ValueError: everywhere (work.py:5)" in node.text for node in nodes)


@pytest.mark.slow
def test_a_script_beside_a_module_of_the_packages_name_is_told_alike(one: Machines) -> None:
    one.script("1 / 0", "train.py")
    node = one.start("--script", "train.py", env={"PYTHONSAFEPATH": "1", "LAUNCH_RESTARTS": "0"})
    assert node.wait() == Exit.FAILED
    assert node.text.count("Traceback") == 1
    assert node.text.count("rank 0 failed: ZeroDivisionError: division by zero (train.py:1)") == 1


@pytest.mark.slow
def test_the_trainer_with_code_of_the_users_that_fails_at_a_step(one: Machines) -> None:
    one.script(
        "calls = 0\n"
        "def loss(output, batch):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return output.mean() if calls < 12 else None + 1\n",
        "mine.py",
    )
    config = {**USUAL, "loss": "mine:loss", "steps": 20, "compile": False}
    node = one.start(env={"LAUNCH_CONFIG": json.dumps(config)})
    assert node.wait() == Exit.FAILED, node.text
    assert node.text.count("Traceback") == 1, node.text
    assert "failed twice in the same way" in (one.run_folder / "terminal").read_text()
    assert "mine.py:5" in (one.run_folder / "terminal").read_text()


def fault(**changed: object) -> Fault:
    usual = Fault("KeyError: 'x'", "work.py:3", 7, 0, 1, peer=False, transient=False, permanent=False)
    return usual._replace(**changed)  # type: ignore[arg-type]  # a test names fields of any type


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"error": "KeyError: 'y'", "rank": 3, "pid": 9}, True),
        ({"error": "ValueError: 'x'"}, False),
        ({"step": 8}, False),
        ({"place": "work.py:4"}, False),
        ({"transient": True}, False),
        ({"step": None}, False),
    ],
)
def test_what_makes_two_failures_one(changed: dict[str, object], same: bool) -> None:
    before, now = Outcome(0, 1, faults=(fault(),)), Outcome(1, 1, faults=(fault(**changed),))
    assert (recurring_fault([before], [now]) is not None) == same
    assert recurring_fault([before], [now, Outcome(0, -9)]) is None, "a signal ended a peer: its own fault is unknown"


def test_where_the_step_is_unknown_the_text_counts_too() -> None:
    def twice(error: str) -> Fault | None:
        return recurring_fault(
            [Outcome(0, 1, faults=(fault(step=None),))], [Outcome(0, 1, faults=(fault(step=None, error=error),))]
        )

    assert twice("KeyError: 'x'")
    assert twice("KeyError: 'y'") is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.cuda.set_device(0),
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.nn.Linear(1, 1).to(0),
        torch.cuda.Stream,
        torch.cuda.Event,
        torch.cuda.reset_peak_memory_stats,
        lambda: torch.Generator(device="cuda"),
        lambda: torch.zeros(1, pin_memory=True),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what torch says without a GPU")
def test_what_torch_says_without_a_gpu_is_said_in_plain_words(ask: Callable[[], object]) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011 - torch has many for it
        ask()
    assert faults.NEEDS_GPU in str(faults.fault_of(error.value))


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("No CUDA GPUs are available", True),
        ("Distributed package doesn't have NCCL built in", True),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", True),
        ("ProcessGroupNCCL is only supported with GPUs, no GPUs found!", True),
        ("Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.", True),
        ("CUDA driver version is insufficient for CUDA runtime version", True),
        ("0 active drivers ([]). There should only be one.", True),
        ("Unknown backend: 'gpu' requested, but no platforms that are instances of gpu are present.", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: invalid device ordinal", False),
        ("'cuda'", False),
    ],
)
def test_errors_of_machines_and_builds_without_cuda(text: str, needs: bool) -> None:
    assert (faults.NEEDS_GPU in faults.with_gpu_hint(f"RuntimeError: {text}")) == needs
    assert faults.with_gpu_hint(faults.with_gpu_hint(text)) == faults.with_gpu_hint(text)


def test_a_record_that_can_not_be_written_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(faults.FOLDER, str(tmp_path / "nowhere"))
    for _ in range(2):
        faults.report(ValueError("seen"))
    assert capsys.readouterr().err == "ValueError: seen\n" * 2


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OSError(5, "Input/output error"), True),
        (OSError(107, "Transport endpoint is not connected"), True),
        (type("HTTPError", (OSError,), {})("503 Server Error: Service Unavailable"), True),
        (caused(FileNotFoundError("not in the cache"), ConnectionRefusedError("the hub")), True),
        (caused(ValueError("no tokenizer"), TimeoutError()), True),
        (type("DistBackendError", (RuntimeError,), {})("NCCL error: unhandled cuda error"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."), True),
        (RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"), True),
        (RuntimeError("UNAVAILABLE: failed to connect to all addresses"), True),
        (subprocess.CalledProcessError(1, ["python", "train.py"]), True),
        (FileNotFoundError(2, "No such file or directory"), False),
        (PermissionError(13, "Permission denied"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (caused(ValueError("x"), KeyError("y")), False),
    ],
)
def test_which_failures_may_not_come_again(error: Exception, transient: bool) -> None:
    assert faults.fault_of(error).transient == transient


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ModuleNotFoundError("No module named 'x'", name="x"), True),
        (ImportError("cannot import name 'x' from 'y'", name="y", path="y.py"), True),
        (ImportError("x.so: file too short", name="x", path="/cache/x.so"), False),  # another rank builds it
        (ModuleNotFoundError("No module named 'transformers_modules.a'", name="transformers_modules.a"), False),
        (caused(ImportError("x"), OSError(5, "Input/output error")), False),
        (SyntaxError("invalid syntax", ("work.py", 1, 1, "def f(:")), True),
        (SyntaxError("invalid syntax", ("<unknown>", 1, 1, "1 +")), False),  # ast.literal_eval of data
        (SyntaxError("invalid syntax", ("/cache/generated.py", 1, 1, "de")), False),
    ],
)
def test_which_failures_no_restart_can_repair(
    error: Exception, permanent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(faults.CODE, str(tmp_path))
    monkeypatch.setattr(faults, "step", None)
    assert faults.fault_of(error).permanent == permanent
    monkeypatch.setattr(faults, "step", 3)
    assert not faults.fault_of(error).permanent


def test_an_errors_note_is_not_its_text() -> None:
    error = ValueError("the reason")
    error.add_note("seen in sample 7")
    assert faults.fault_of(error).error == "ValueError: the reason"


def test_what_a_stopped_node_fails_with_is_no_reason() -> None:
    lost = Outcome(0, 1, faults=(fault(transient=True),))
    stopped = Outcome(1, 1, note="stopped with the others", faults=(fault(),))
    assert recurring_fault([lost, stopped], [lost, stopped]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "starts"),
    [
        (("--command", "--", "sh", "-c", "python -c 'import nothing_of_this_name'; python work.py; exit 1"), "012"),
        (("--command", "--", "sh", "-c", "python -c 'import nothing_of_this_name'; exec python work.py"), "012"),
    ],
)
def test_a_command_may_go_on_after_a_process_that_failed(one: Machines, argv: tuple[str, ...], starts: str) -> None:
    one.script(GENERATION + "raise ConnectionResetError('the data server')")
    node = one.start(*argv, env={"LAUNCH_RESTARTS": "2"}, timing={"quick": 0.0})
    assert node.wait() == Exit.FAILED, node.text
    assert generations(node) == starts
    assert "failed: ConnectionResetError" in node.text
    assert "failed: ModuleNotFoundError" not in node.text


@pytest.mark.parametrize("argv", [PYTHON, ("--command", "--", "python", "work.py")])
def test_a_scripts_subprocesses_print_what_they_always_print(one: Machines, argv: tuple[str, ...]) -> None:
    one.script(
        "import subprocess, sys\n"
        "for _ in range(2):\n"
        "    ran = subprocess.run([sys.executable, '-c', '1 / 0'], stderr=subprocess.PIPE, check=False)\n"
        "    print('captured', b'ZeroDivisionError' in ran.stderr)\n"
    )
    node = one.start(*argv)
    assert node.wait() == Exit.OK
    assert node.text.count("captured True") == 2


@pytest.mark.slow
def test_a_script_that_exits_with_2_after_steps_is_retried(one: Machines) -> None:
    one.script(GENERATION + "from launch_train import metrics; metrics.log(1, loss=1.0); sys.exit(2)")
    node = one.start(*PYTHON, env={"LAUNCH_RESTARTS": "1"})
    assert node.wait() == Exit.FAILED, node.text
    assert generations(node) == "01"


@pytest.mark.slow
def test_what_a_spawned_process_failed_with_is_the_reason(one: Machines) -> None:
    one.script(
        GENERATION + "import torch.multiprocessing as mp\n"
        "def work(rank): raise ValueError(os.environ['LAUNCH_GENERATION'])\n"
        "if __name__ == '__main__': mp.spawn(work, nprocs=1)\n"
    )
    node = one.start(*PYTHON, env={"LAUNCH_RESTARTS": "1"}, timing={"quick": 0.0})
    assert node.wait() == Exit.FAILED
    assert generations(node) == "01"
    assert [f"failed: ValueError: {start} (work.py:4)" in node.text for start in range(2)] == [True] * 2, node.text

"""The acceptance of a GPU machine: each check can fail, no row ends the others, and nothing private is kept."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import plain_loop
from benchmarks.gpu_acceptance import __main__ as program
from benchmarks.gpu_acceptance import adopt as adopting
from benchmarks.gpu_acceptance import (
    gputests,
    log,
    machine,
    runs,
    small,
    speed,
    techniques,
)
from benchmarks.gpu_acceptance.__main__ import Session
from benchmarks.gpu_acceptance.log import Log
from benchmarks.gpu_acceptance.tasks import ROOT, Measured, Place, SkipRow, Task, Verdict
from launch_train.common.config import Config, parse
from tests import features, what_ran

TASKS = {task.key: task for task in program.tasks((1, 2, 3))}


# --- Each check can fail ----------------------------------------------------------------------------------------------

LOSSES = [4.0, 3.5, 3.0, 2.5]
LEARNS = {"losses": LOSSES, "reference": [4.0, 3.52, 2.99, 2.51]}
FAR, FLAT = [4.0, 3.9, 3.4, 2.9], [4.0] * 4
RESUMED = {"codes": [75, 0], "steps": 4, "resumed": [2], "losses": LOSSES, "reference": LOSSES, "said": ""}


@pytest.mark.parametrize(
    ("key", "measured", "wrong"),
    [
        ("1 bf16", {"kind": "bf16", "precision": "bf16", **LEARNS, "choices": {}}, {"reference": FAR}),
        ("1 bf16", {"kind": "bf16", "precision": "bf16", **LEARNS, "choices": {}}, {"reference": LOSSES}),
        ("1 attention flash", {"kernel": "flash", **LEARNS, "choices": {"attention": "flash"}}, {"choices": {}}),
        ("1 ddp", {"backend": "nccl", "world_size": 2, "expected": ["nccl", 2], **LEARNS}, {"world_size": 1}),
        ("1 resume", {**RESUMED, "sha256": ["ab", "ab"]}, {"losses": [*LOSSES[:3], 2.5000000000000004]}),
        ("1 resume", {**RESUMED, "sha256": ["ab", "ab"]}, {"resumed": []}),
        ("1 memory probe", {"chosen": 512, "share": 4096, "predicted_gb": 2.2, "memory_gb": 2.1}, {"memory_gb": 2.9}),
        ("2 gpt losses", {**LEARNS, "steps": 4}, {"losses": FLAT, "reference": FLAT}),
    ],
)
def test_a_check_passes_what_is_right_and_refuses_what_is_not(
    key: str, measured: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert TASKS[key].judge(measured).ok, TASKS[key].judge(measured).why
    assert not TASKS[key].judge({**measured, **wrong}).ok


# --- One row takes no other with it -----------------------------------------------------------------------------------


def _fine(_: Place) -> Measured:
    return {"value": 1}


def _crashes(_: Place) -> Measured:
    print("the last words")
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _raises(_: Place) -> Measured:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def _hangs(place: Place) -> Measured:
    """With a program that has a session of its own, and would keep the GPU's memory."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(sleeps, env=place.env, start_new_session=True)
    (place.folder.parent / "pid").write_text(str(process.pid))
    time.sleep(600)
    return {}


def _lacks(_: Place) -> Measured:
    raise SkipRow("needs 2 GPUs")


def _private(_: Place) -> Measured:
    loop = "train/launch_train/trainer/train.py"
    print(f"{ROOT}/{loop}, {Path.home()}/secret, {socket.gethostname()}, /opt/canary/inner/lib/torch/loop.py")
    return {"path": str(ROOT / "train"), "inner": [{"name": f"on canary-host, {Path.cwd()}"}], "nan": float("nan")}


def judge_value(measured: Measured) -> Verdict:
    return Verdict(measured.get("value", 1) == 1, "as expected")


def task(name: str, work: Callable[[Place], Measured], **more: Any) -> Task:
    return Task(1, name, "about", work, judge_value, **{"on_cpu": "", **more})


@pytest.fixture
def session(tmp_path: Path) -> Session:
    program._load()  # as the command does: a row is a fork
    return Session(
        log=Log(tmp_path / "out"),
        device=machine.Device("CPU", 0, ""),
        commit="c0ffee",
        tiny=True,
        until=time.monotonic() + 300,
        scratch=tmp_path / "scratch",
        jobs=2,
    )


def statuses(session: Session) -> dict[str, str]:
    return {row["name"]: row["status"] for row in session.rows.values()}


@pytest.mark.slow
def test_rows_that_crash_hang_or_fail_are_rows(session: Session) -> None:
    rows = [
        *(task("crashes", _crashes), task("raises", _raises), task("hangs", _hangs, limit=5), task("lacks", _lacks)),
        *(task("gpu", _fine, on_cpu=None), task("fine", _fine)),
    ]
    program.run(session, rows)
    assert statuses(session) == {
        "crashes": "failed",
        "raises": "failed",
        "hangs": "failed",
        "lacks": "needs 2 GPUs",
        "gpu": "needs a GPU",
        "fine": "ok",
    }
    named = {row["name"]: row for row in session.rows.values()}
    assert named["crashes"]["output"] == ["the last words"]
    assert "CUDA out of memory" in named["raises"]["why"]
    assert "killed after" in named["hangs"]["why"]
    pid = int((session.scratch / "pid").read_text())
    assert not lives(pid)


def lives(pid: int) -> bool:
    """Nobody may have waited yet for one that was killed."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_command_that_is_ended_leaves_nothing_running(tmp_path: Path) -> None:
    """Not even what its rows have started: it would hold the GPU."""
    code = f"""
import sys, time
from pathlib import Path
from benchmarks.gpu_acceptance import __main__ as program
from tests import test_gpu_acceptance as tests
program.tasks = lambda parts: [tests.task("hangs", tests._hangs)]
program.main(["--tiny", "--out", {str(tmp_path / "out")!r}])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 100
    while not (found := list(tmp_path.glob("acceptance-*/pid"))) and time.monotonic() < until:
        time.sleep(0.05)
    while not found[0].read_text():
        time.sleep(0.05)
    pid = int(found[0].read_text())
    assert lives(pid)
    command.terminate()
    assert command.wait(30) == 143
    assert not lives(pid)


# --- The log ----------------------------------------------------------------------------------------------------------


def test_a_second_command_goes_on_with_what_is_missing(session: Session, tmp_path: Path) -> None:
    count = tmp_path / "count"

    def counted(_: Place) -> Measured:
        with count.open("a") as file:
            file.write("x")
        return {"value": len(count.read_text())}

    first, second = task("first", counted), task("second", counted)
    program.run(session, [first])
    rows = session.log.folder / log.ROWS
    rows.write_text(rows.read_text() + '{"key": "1 second", "sta')  # cut off within a line
    again = again_from(session)
    program.run(again, [first, second])
    assert (count.read_text(), statuses(again)) == ("xx", {"first": "ok", "second": "failed"})
    program.run(last := again_from(session), [first, second])
    assert count.read_text() == "xx"
    program.run(last, [first, second], retry=True)
    assert count.read_text() == "xxx"
    assert last.rows["1 second"]["try"] == 2
    program.run(again_from(session), [first, second], retry=True)
    assert count.read_text() == "xxx"  # once
    program.run(again_from(session, commit="0ddba11"), [first])
    program.run(again_from(session, device=machine.Device("NVIDIA H200", 0, "")), [first])
    assert count.read_text() == "xxxxx"
    page = (session.log.folder / "part-1.md").read_text()
    assert "| first | " in page


def again_from(session: Session, **more: Any) -> Session:
    """As the next command has it."""
    found = replace(session, **{"rows": {}, "left": [], **more})
    found.rows = log.newest(row for row in found.log.rows() if found.mine(row))
    return found


def test_no_row_is_started_that_cannot_end_in_time(session: Session) -> None:
    session.device, session.tiny = machine.Device("NVIDIA H200", 1, "13.0"), False
    session.until = time.monotonic() + 60
    program.run(session, [task("long", _fine, seconds=90), task("short", _lacks, seconds=3)])
    assert statuses(session) == {"short": "needs 2 GPUs"}
    assert "Not run, not enough time left: long." in (session.log.folder / "part-1.md").read_text()


def test_a_row_cut_off_by_the_end_of_the_session_is_due_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own limit is far away, so it did not fail: the next command runs it."""
    monkeypatch.setattr(program, "SPARE", 0.0)
    session.device, session.tiny = machine.Device("NVIDIA H200", 1, "13.0"), False
    session.until = time.monotonic() + 1.5
    program.run(session, [task("long", _hangs, seconds=0.1)])
    assert (statuses(session), session.left) == ({}, ["1 long"])
    assert "1 long" not in again_from(session).rows
    assert "long" in (session.log.folder / "part-1.md").read_text()
    program.run(later := again_from(session, until=time.monotonic() + 300), [task("long", _fine)])
    assert statuses(later) == {"long": "ok"}


def test_nothing_private_is_written(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine's name, its user, and where things lie on it."""
    monkeypatch.setattr(socket, "gethostname", lambda: "canary-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "canaryuser")
    home = tmp_path / "home" / "canaryuser"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    whole = task("private", _private, on_cpu="")
    program.run(session, [whole, task("raises", _raises)])
    session.log.add({"uuid": "GPU-8a5ec8de-1111-2222-3333-444455556666", "said": "canaryuser@canary-host:~$"})
    text = "".join(path.read_text() for path in session.log.folder.iterdir())
    assert "train/launch_train/trainer/train.py" in text  # it was there
    for word in ("canary-host", "canaryuser", "/opt/canary", str(ROOT), str(tmp_path), "8a5ec8de"):
        assert word not in text, word
    row = session.rows["1 private"]
    assert row["measured"]["nan"] == "nan"


# --- The GPU tests ----------------------------------------------------------------------------------------------------


LACKING = """
import sys
class Lacking:
    names = ("google.cloud", "google.api_core", "google.auth", "docker", "cryptography", "websockets", "tiktoken")
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
"""


@pytest.mark.slow
def test_they_are_collected_where_there_is_no_google_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a bare GPU machine."""
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = Place(tmp_path / "row", tiny=True)
    place.folder.mkdir()
    found = gputests._collected(place)
    assert gputests.judge_collected(found).ok, found


# --- Results in the repository ----------------------------------------------------------------------------------------


def row(part: int, name: str, **more: Any) -> dict[str, Any]:
    """As the log has it."""
    head = {"key": f"{part} {name}", "part": part, "name": name, "about": "…", "status": "ok", "why": "400,000/s"}
    tail = {"seconds": 10.0, "time": "2026-12-01T10:00:00+00:00", "commit": "c0ffee", "device": "NVIDIA H200"}
    return {**head, **tail, "tiny": False, "try": 1, "measured": {}, **more}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages and result files that --adopt writes, in a folder of their own."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for module, name in ((features, "PAGE"), (what_ran, "PAGE"), (what_ran, "README"), (what_ran, "FIGURES")):
        page: Path = getattr(module, name)
        copy = tmp_path / page.relative_to(ROOT)
        copy.write_text(page.read_text())
        monkeypatch.setattr(module, name, copy)
    folder = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(adopting, "RESULTS", folder)
    monkeypatch.setattr(features, "RAN", folder / "ran-on.json")
    monkeypatch.setattr(what_ran.renew, "__defaults__", (folder,))
    return tmp_path


def test_results_are_adopted(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two commands: the newest row counts, a digest becomes the commit, and the pages say it."""
    monkeypatch.setattr(machine, "head", lambda: "0123456789")
    first, second = Log(tmp_path / "first"), Log(tmp_path / "second")
    first.add(
        {"machine": {**machine.described(machine.Device("NVIDIA H200", 1, "13.0")), "command": "…", "commit": "x"}}
    )
    digest = f"source-{machine.source()}"
    for one in (row(1, "bf16", commit=digest), row(1, "resume", status="failed", commit=digest)):
        first.add(one)
    for two in (row(1, "resume", commit=digest), row(1, "tf32", status="failed", commit=digest), row(2, "gpt losses")):
        second.add(two)
    second.add(row(1, "fp32", device="CPU", tiny=True))
    ran = {"device": "NVIDIA H200", "date": "2026-12-01"}
    (first.folder / "ran-on.json").write_text(json.dumps({"test_gpu.py::test_cuda_graphs_learn_alike": ran}))
    assert program.main(["--adopt", str(first.folder), str(second.folder)]) == 0
    results = repository / "benchmarks" / "results"
    kept = json.loads((results / "gpu-acceptance-2026-12-01-nvidia-h200.json").read_text())
    assert (kept["commit"], kept["device"], len(kept["rows"])) == ("0123456789", "NVIDIA H200", 4)
    text = (results / "gpu-acceptance-2026-12-01-nvidia-h200.md").read_text()
    assert "part 1" in text
    assert "| gpt losses | ok | 400,000/s |" in text
    assert (
        "(`h200`) | ran on 2026-12-01 with 0123456789: 2 of 3 checks |" in (repository / "docs/what-ran.md").read_text()
    )
    assert "(`h100`) | not yet; only on CPUs |" in (repository / "docs/what-ran.md").read_text()
    assert "| gpt losses | 400,000/s |" in (repository / "docs/performance.md").read_text()
    assert "| CUDA graphs | `cuda_graphs` | NVIDIA H200, 2026-12-01 |" in (repository / "docs/train.md").read_text()
    assert "H200" in (repository / "README.md").read_text()


def test_the_pages_are_current() -> None:
    """`make golden` renews them."""
    for path, text in what_ran.pages().items():
        assert path.read_text() == text, path.name


UNRESOLVED = """
import socket
socket.gethostname = lambda: "nowhere.invalid"
socket.getfqdn = lambda name="": "nowhere.invalid"
"""


@pytest.mark.slow
def test_torchrun_needs_no_name_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine's own name doesn't resolve: without --local-addr the processes wait for that name."""
    (tmp_path / "sitecustomize.py").write_text(UNRESOLVED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Place, "within", lambda _, seconds: min(100, seconds))
    place = Place(tmp_path / "row", tiny=True)
    place.folder.mkdir()
    found = TASKS["1 nccl"].work(place)
    assert TASKS["1 nccl"].judge(found).ok, found


# --- What only a GPU will run -----------------------------------------------------------------------------------------


FAKE = {
    "losses": [3.0, 2.0],
    "step_s": [0.1] * 20,
    "mfu": [0.4] * 20,
    "memory_gb": 1.0,
    "events": ["checkpoint"] * 3,
    "choices": {"micro-batch": "8"},
    "reasons": {},
    "precision": "bf16",
    "skipped": [],
    "micro": [],
    "resumed": [],
    "out_of_memory": [],
    "backend": "nccl",
    "world_size": 1,
    "parameters_sha256": "ab",
}


OTHERS = {
    "script", "fsdp on one GPU", "ddp", "resnet50 JPEGs beside synthetic",
    "cuda sanitizer", "gpt 1.3B fsdp",
}  # fmt: skip
"""Rows that don't train with settings of their own or, on one GPU, at all; the last two start CUDA or NCCL."""

TRAINING = [one.key for one in (*techniques.TASKS, *runs.TASKS, *speed.TASKS) if one.name not in OTHERS]


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("key", TRAINING)
def test_on_a_gpu_the_trainer_takes_the_settings_of_each_row(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the real sizes: a wrong setting would cost a row of the one visit. Nothing is trained."""
    from launch_train.trainer import train as loop

    taken: list[Config] = []
    monkeypatch.setattr(Place, "device", torch.device("cpu"))
    monkeypatch.setattr(loop, "train", lambda config, *_: taken.append(config))
    monkeypatch.setattr(small, "_peaked", lambda _: 0.0)
    monkeypatch.setattr(small, "_peak_gb", lambda _: 1.0)
    for module in (small, runs):
        monkeypatch.setattr(module, "read", lambda _: FAKE)
    monkeypatch.setattr(techniques, "limited", lambda *_: nullcontext())
    monkeypatch.setattr(techniques, "_filled", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(speed, "measure", lambda loops, _: _noted(taken, loops))
    monkeypatch.setattr(speed, "pictures", lambda _: nullcontext(tmp_path))
    monkeypatch.setattr(plain_loop, "train", lambda *_: [3.0, 2.0])
    for module in (runs, speed):
        monkeypatch.setattr(module, "program", _program(taken), raising=False)
    monkeypatch.setattr(runs, "Node", _node(taken))
    with suppress(OSError, KeyError, ValueError, LookupError):  # nothing was really measured
        TASKS[key].work(Place(tmp_path, gpus=1))
    assert taken


def _noted(taken: list[Config], loops: Any) -> None:
    taken += [parse(loop.told["config"]) for loop in loops if loop.program == "trainer"]
    raise KeyError


def _program(taken: list[Config]) -> Callable[..., Any]:
    def program(_argv: Any, _place: Any, _seconds: Any, **env: str) -> None:
        if "LAUNCH_CONFIG" in env:
            taken.append(parse(json.loads(env["LAUNCH_CONFIG"])))
        raise KeyError

    return program


def _node(taken: list[Config]) -> Callable[..., Any]:
    def node(_place: Any, _name: str, settings: Any, *_: Any, **__: Any) -> None:
        if settings:
            taken.append(parse(settings))
        raise KeyError

    return node


@pytest.mark.slow
def test_a_command_carries_on_with_the_rows_of_an_earlier_one(tmp_path: Path) -> None:
    """Of the same commit, device and version of torch."""
    which = {"commit": machine.commit(), "device": "CPU", "tiny": True, "torch": machine.torch_version()}
    done = {"status": "ok", "why": "", "measured": {}, "seconds": 1.0, "time": "2026-11-24T00:00:00+00:00", "try": 1}
    row = {"key": "1 facts", "part": 1, "name": "facts", "about": "", **done, **which}
    first = Log(tmp_path / "first")
    first.add(row)
    first.add({**row, "key": "1 imports", "name": "imports", "torch": "2.11.0"})
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--tiny", "--only", "facts", "--minutes", "5"]
    command += ["--out", str(tmp_path / "second"), "--carry", str(first.folder / "rows.jsonl")]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'train'}"}
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert "1 rows already measured" in said
    assert [found["key"] for found in Log(tmp_path / "second").rows() if "key" in found] == ["1 facts", "1 imports"]

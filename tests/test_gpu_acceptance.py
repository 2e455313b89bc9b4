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
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_acceptance import __main__ as program
from benchmarks.gpu_acceptance import adopt as adopting
from benchmarks.gpu_acceptance import (
    machine,
)
from benchmarks.gpu_acceptance.__main__ import Session
from benchmarks.gpu_acceptance.log import Log
from benchmarks.gpu_acceptance.tasks import ROOT, Measured, Place, SkipRow, Task, Verdict
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

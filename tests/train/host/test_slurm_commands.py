"""What launch asks of Slurm's commands, and what it makes of odd answers: with programs in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launch_train.host import slurm
from launch_train.host.__main__ import answer_to
from launch_train.host.job import describe_jobs

NUMBER = 7


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Slurm's commands, first on PATH; all of them fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun", "sacct"):
        program(folder, name, "echo away >&2; exit 1")
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A job that Slurm has queued."""
    folder = tmp_path / "launch" / "jobs" / "id"
    folder.mkdir(parents=True)
    job = {"id": "id", "run": "run", "script": "#!/bin/sh\n", "created": time.time(), "hours": 1, "folder": ""}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "lock").touch()
    (folder / "slurm.json").write_text(json.dumps({"number": NUMBER}))
    return tmp_path / "launch"


def described(root: Path) -> dict[str, Any]:
    (job,) = slurm.add_states(root, describe_jobs(root, ["id"]))
    return job


def test_a_job_that_ends_while_slurm_is_asked_has_its_end(root: Path, programs: Path) -> None:
    end = root / "jobs" / "id" / "end.json"
    program(
        programs,
        "squeue",
        f"""echo '{{"code": 0, "stopped": "", "time": 1}}' > {end}; echo '{NUMBER}|COMPLETED|None'""",
    )
    job = described(root)
    assert not job["running"]
    assert job["end"]["code"] == 0


def test_a_job_that_neither_slurm_nor_its_accounting_knows(root: Path, programs: Path) -> None:
    program(programs, "squeue", "exit 0")
    program(programs, "sacct", "exit 0")
    assert described(root)["slurm"] == "UNKNOWN"


def test_the_text_of_a_profile_is_no_answer(
    root: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    hidden = programs.rename(tmp_path / "slurm")
    profile = f"echo 'Welcome | to | the cluster'\nexport PATH={hidden}:$PATH SQUEUE_PARTITION=other\n"
    (tmp_path / "home" / ".bash_profile").write_text(profile)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("shutil.which", lambda _name: None)
    program(hidden, "squeue", f'[ -z "$SQUEUE_PARTITION" ] && echo "{NUMBER}|RUNNING|None"')
    program(hidden, "sbatch", "cat > /dev/null; echo 'Job 8 to start at noon' >&2")
    assert described(root)["slurm"] == "RUNNING"
    assert slurm.test_job("#!/bin/sh\n") == "Job 8 to start at noon"


def test_a_job_of_slurm_does_not_leak_into_one_that_it_submits(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "5")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    program(programs, "sbatch", 'echo "$SLURM_CONF$SLURM_MEM_PER_NODE"')
    assert slurm.slurm("sbatch").strip() == "/etc/slurm.conf"


@pytest.mark.parametrize("text", ["12\n", "12;cluster\n", "-> Checking your project ... OK\n12\n"])
def test_the_number_is_the_last_word_of_sbatch(text: str) -> None:
    assert slurm.submitted_number(text) == 12


def test_a_cancelled_job_that_came_back_to_the_queue_is_removed(root: Path, programs: Path, tmp_path: Path) -> None:
    program(programs, "squeue", f"echo '{NUMBER}|PENDING|BeginTime'")
    program(programs, "scancel", f'echo "$@" >> {tmp_path}/told')
    (root / "jobs" / "id" / "cancel").touch()
    described(root)
    assert (tmp_path / "told").read_text() == f"--state=PENDING {NUMBER}\n"


def test_the_record_of_a_queued_job_is_kept(root: Path, programs: Path) -> None:
    program(programs, "squeue", f"echo '{NUMBER}|PENDING|Priority'")
    answer_to("remove", {"id": "id"}, root)
    assert (root / "jobs" / "id" / "job.json").exists()
    program(programs, "squeue", f"echo '{NUMBER}|CANCELLED|None'")
    answer_to("remove", {"id": "id"}, root)
    assert not (root / "jobs" / "id").exists()


def batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SLURM_JOB_ID", str(NUMBER))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(slurm, "REQUEUE_PAUSES", (0.05,) * 3)
    monkeypatch.setattr(slurm, "REQUEUE_SECONDS", 0.05)
    return slurm.run_batch(root, "id")


def test_a_job_that_slurm_queued_again_after_its_interruption_continues(
    root: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end = root / "jobs" / "id" / "end.json"
    program(programs, "scontrol", f'echo "$@" >> {tmp_path}/asked; echo n1')
    program(programs, "srun", "exit 0")
    end.write_text(json.dumps({"code": 75, "stopped": "interrupted", "time": 1}))
    assert batch(root, monkeypatch) == 0
    assert json.loads(end.read_bytes())["stopped"] == ""
    assert f"update JobId={NUMBER} Requeue=0" in (tmp_path / "asked").read_text()  # else 24.11 starts it once more


@pytest.mark.parametrize("stopped", ["", "cancelled", "expired", "interrupted"])
def test_an_ended_job_is_not_revived(
    root: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stopped: str
) -> None:
    text = json.dumps({"code": 75, "stopped": stopped, "time": 1})
    (root / "jobs" / "id" / "end.json").write_text(text)
    if stopped == "interrupted":  # launch has read it as a failure, and may have begun another attempt
        (root / "jobs" / "id" / "slurm.json").write_text(json.dumps({"number": NUMBER, "state": "FAILED"}))
    assert batch(root, monkeypatch) == 0
    assert "ends at once" in capfd.readouterr().out
    assert (root / "jobs" / "id" / "end.json").read_text() == text


@pytest.mark.parametrize("code", [75, 143, 137])
def test_a_job_is_queued_again_although_slurm_is_away_at_first_and_the_disk_is_full(
    root: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    """143 and 137: it was interrupted before there was anything to save."""
    away = f'n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n; [ "$n" -lt 2 ] && exit 1'
    program(programs, "squeue", f"{away}; echo RUNNING")
    program(
        programs,
        "scancel",
        f"[ -e {tmp_path}/tried ] && touch {tmp_path}/told; touch {tmp_path}/tried; [ -e {tmp_path}/told ]",
    )
    once = f"[ -e {tmp_path}/refused ] || {{ touch {tmp_path}/refused; exit 1; }}"
    program(programs, "scontrol", f'[ "$1" = show ] && echo n1 && exit; {once}; touch {tmp_path}/requeued')
    program(programs, "srun", f"while ! [ -e {tmp_path}/told ]; do sleep 0.05; done; exit {code}")
    monkeypatch.setattr(slurm, "RESEND_SECONDS", 0.1)
    monkeypatch.setattr(slurm, "stop_reason", lambda *_: "interrupted")
    (root / "jobs" / "id" / ".starts").mkdir()  # it can't be written
    assert batch(root, monkeypatch) == 0
    assert (tmp_path / "requeued").exists()
    assert not (root / "jobs" / "id" / "end.json").exists()


def test_waits_cost_nothing(root: Path, programs: Path) -> None:
    program(programs, "squeue", f"echo '{NUMBER}|RUNNING|None'")
    starts = [{"begin": 100.0, "seen": 150.0}, {"begin": 400.0, "seen": 430.0}]
    (root / "jobs" / "id" / "starts.json").write_text(json.dumps(starts))
    job = described(root)
    assert job["seen"] - job["started"] == 50 + 30


def test_a_job_that_never_started_ended_once(root: Path, programs: Path) -> None:
    program(programs, "squeue", f"echo '{NUMBER}|CANCELLED|None'")
    described(root)
    os.utime(root / "jobs" / "id" / "slurm.json", (1000, 1000))
    assert described(root)["seen"] == 1000


def test_a_run_that_is_complete_as_it_is_stopped_has_succeeded(
    root: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "scontrol", "echo n1")
    program(programs, "scancel", "exit 0")
    program(programs, "srun", "sleep 0.5")
    monkeypatch.setattr(slurm, "stop_reason", lambda *_: "interrupted")
    assert batch(root, monkeypatch) == 0
    assert json.loads((root / "jobs" / "id" / "end.json").read_bytes())["stopped"] == ""


def test_a_node_starts_while_another_one_writes_its_programs(root: Path) -> None:
    """On a shared disk, a program that is open for writing can't be executed (ETXTBSY)."""
    path = root / "jobs" / "id" / "job.json"
    job: dict[str, Any] = {
        "argv": ["python", "-c", "import shutil; print(shutil.which('python'))"],
        "python": sys.executable,
    }
    job |= {"env": {contract.CLUSTER_SPEC: json.dumps({"task": {}})}, "gpus": 0, "code": "", "trainer": "none"}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | job))

    def start_node(index: int) -> str:
        env = {"SLURM_PROCID": str(index), "SLURM_JOB_ID": str(NUMBER), "LAUNCH_HOSTS": "n1,n2"}
        argv = [sys.executable, "-m", "launch_train.host", str(root), "node", "id"]
        ran = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    with Path(start_node(0)).open("a"):
        start_node(1)

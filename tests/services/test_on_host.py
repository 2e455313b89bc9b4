"""`launch on HOST` against OpenSSH's server on the loopback interface: one job, whatever dies, and no step lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch_train.common.storage import LocalFolder
from launch_train.host import machine
from launch_train.runfolder.run import read_run
from launcher.errors import LaunchError, NoCapacity, NotAuthorised, UsageError
from launcher.remote.agent import Agent, trainer_digest
from launcher.remote.connection import Connection, Host, connect_to
from launcher.runs.on_host import host_and_run, host_records
from launcher.services.hosts.arrival import check_free_gpus
from launcher.services.hosts.service import OnHost
from tests.plan.planning import planned
from tests.remote.hosts import NAME, a_host, host_request, launch, started
from tests.ssh.server import SshServer

SPEC = """
name: tiny
run: {script: work.py, args: [--seconds, "SECONDS"]}
machine: {type: l4, gpus: 1}
env: {NCCL_IB_HCA: mlx5_0}
"""
WORK = """
import os, sys, time
from helper import GREETING
import launch_train.metrics
print(GREETING, os.environ["NCCL_IB_HCA"], flush=True)
for step in range(int(float(sys.argv[2]) * 5)):
    launch_train.metrics.log(step + 1, loss=1.0 / (step + 1))
    time.sleep(0.2)
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Path]:
    """Return the function that writes a job of so many seconds."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "work.py").write_text(WORK)
    (folder / "helper.py").write_text("GREETING = 'hello from the host'\n")
    monkeypatch.chdir(folder)

    def write(seconds: float) -> Path:
        (folder / "job.yaml").write_text(SPEC.replace("SECONDS", f"{seconds:g}"))
        return folder / "job.yaml"

    return write


def reach(name: str, *, accept_host_key: bool = False) -> None:
    Connection(Host(name), accept_host_key=accept_host_key).run("true")


def jobs_on(host: SshServer) -> list[dict[str, Any]]:
    folder = host.home / "launch" / "jobs"
    return [json.loads(path.read_bytes()) for path in folder.glob("*/job.json")]


def wait_until(is_true: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.1)


def processes_of(host: SshServer, words: bytes = b"launch_train") -> list[int]:
    """Return the processes of the host's jobs, or those among them with these words in their command line."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_job = b"launch_train" in (text := (process / "cmdline").read_bytes()) and words in text
            if is_job and str(host.home).encode() in (process / "environ").read_bytes():
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_dry_run_needs_no_host(job: Callable[[float], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    job(1)
    monkeypatch.setenv("PATH", "/nonexistent")
    planned_run = launch("on", "nosuch.example", "job.yaml", "--gpus", "2", "--price", "3", "--hours", "2", "--dry-run")
    assert planned_run.returncode == 0, planned_run.stderr
    assert "nosuch.example: 2 free GPUs; checked on arrival" in planned_run.stdout
    assert "at most $6" in planned_run.stdout
    colab = launch("on", "colab:run1", "job.yaml", "--dry-run")
    assert "the run folder is lost when the Colab runtime ends" in " ".join(colab.stdout.split())
    document = json.loads(launch("on", "nosuch.example", "job.yaml", "--dry-run", "-o", "json").stdout)
    assert document["attempts"][0]["request"]["host"] == "nosuch.example"
    assert document["run_folder"].startswith("ssh://nosuch.example/~/launch/runs/tiny-")


HOSTS = """
lab:
  host: me@203.0.113.7:2222
  gpus: 4
  type: a100-80gb
  price: 2.5
  python: ~/venv/bin/python
  container: nvcr.io/nvidia/pytorch:25.06-py3
  mounts: [/data]
"""


@pytest.fixture
def hosts_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "launch" / "hosts.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HOSTS)
    return path


def test_hosts_yaml_has_defaults_of_a_host(job: Callable[[float], Path], hosts_yaml: Path) -> None:
    spec = job(1)
    spec.write_text(spec.read_text().replace("machine: {type: l4, gpus: 1}\n", ""))

    def attempt(*words: str) -> dict[str, Any]:
        planned_run = launch("on", "lab", "job.yaml", *words, "--dry-run", "-o", "json")
        assert planned_run.returncode == 0, planned_run.stderr
        document = json.loads(planned_run.stdout)
        assert document["run_folder"].startswith("ssh://lab/~/launch/runs/tiny-")
        return dict(document["attempts"][0])

    def gpus(attempt: dict[str, Any]) -> int:
        return int(attempt["request"]["job"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["acceleratorCount"])

    planned_attempt = attempt()
    assert (gpus(planned_attempt), planned_attempt["usd_per_hour"]) == (4, 2.5)
    assert planned_attempt["usd_rule"] == f"set by {hosts_yaml}:6"
    assert planned_attempt["request"]["python"] == "~/venv/bin/python"
    assert planned_attempt["request"]["container"] == {"image": "nvcr.io/nvidia/pytorch:25.06-py3", "mounts": ["/data"]}
    assert attempt("--container", "/x.sif", "--mount", "/a:/b")["request"]["container"] == {
        "image": "/x.sif",
        "mounts": ["/a:/b"],
    }
    changed = attempt("--gpus", "2", "--price", "3", "--python", "python9")
    assert (gpus(changed), changed["usd_per_hour"], changed["usd_rule"]) == (2, 3.0, "set by --price")
    assert changed["request"]["python"] == "python9"
    spec.write_text(spec.read_text() + "machine: {type: l4, gpus: 1}\n")
    assert gpus(attempt()) == 1  # the spec wins
    assert Host("lab").words == ("-p", "2222", "--", "me@203.0.113.7")
    hosts_yaml.write_text("lab: {host: colab:run1}\n")
    assert Host("lab").words == ("--", "root@colab-run1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lab: {gpu: 2}", "hosts.yaml:1: unknown setting lab.gpu\n    did you mean gpus?"),
        ("\nlab:\n  price: -1", "hosts.yaml:3: lab.price: -1 is out of range"),
        ("a b: {gpus: 2}", "hosts.yaml:1: a b: 'a b' is invalid"),
        ("- lab", "is a list, not a section"),
        ("lab: {gpus: 2}\nlab: {gpus: 3}", "hosts.yaml:2: "),
    ],
)
def test_an_invalid_hosts_yaml_is_refused_with_its_line(
    job: Callable[[float], Path], hosts_yaml: Path, text: str, problem: str
) -> None:
    job(1)
    hosts_yaml.write_text(text)
    refused = launch("on", "lab", "job.yaml", "--dry-run")
    assert refused.returncode == 2
    assert problem in refused.stderr


def test_a_script_runs_on_a_host_with_the_code_that_was_sent(host: SshServer, job: Callable[[float], Path]) -> None:
    job(0.4)
    ran = launch("on", NAME, "job.yaml", "--cpu", "-o", "json")
    assert ran.returncode == 0, ran.stderr
    assert (
        "hello from the host mlx5_0" in ran.stderr
    )  # a rehearsal would drop the setting: it is of the cloud's network
    document = json.loads(ran.stdout)
    assert (document["state"], document["region"]) == ("SUCCEEDED", NAME)
    assert document["results"]["steps"] == 2
    assert list((host.home / "launch" / "runs").iterdir()) == [host.home / "launch" / "runs" / document["run"]]
    assert not list((host.home / "launch" / "work").iterdir())  # its working directory is gone
    for words in (("status",), ("metrics",), ("logs", "--tail", "3"), ("follow",)):
        seen = launch(words[0], document["run"], *words[1:])
        assert seen.returncode == 0, seen.stderr
    assert launch("status", f"{NAME}:tiny").returncode == 0
    assert document["run"] in launch("runs", "--on", NAME).stdout
    again = launch("on", NAME, "job.yaml", "--cpu")
    assert "has already succeeded" in again.stderr
    assert len(jobs_on(host)) == 1
    assert launch("rm", document["run"], "--yes").returncode == 0
    assert not list((host.home / "launch" / "runs").iterdir())
    assert not list(host_records().iterdir())
    assert launch("status", f"{NAME}:tiny").returncode == 2


@pytest.mark.slow
def test_a_killed_launch_loses_nothing_and_two_launches_make_one_job(
    host: SshServer, job: Callable[[float], Path]
) -> None:
    job(8)
    both = [started("on", NAME, "job.yaml", "--cpu") for _ in range(2)]
    wait_until(lambda: jobs_on(host))
    both[0].send_signal(signal.SIGKILL)
    assert both[1].wait(120) == 0, both[1].communicate()
    both[0].communicate()
    both[1].communicate()
    assert len(jobs_on(host)) == 1
    assert jobs_on(host)[0]["run"].startswith("tiny-")


@pytest.mark.slow
def test_after_a_restart_of_the_host_the_next_attempt_follows(host: SshServer, job: Callable[[float], Path]) -> None:
    job(6)
    client = started("on", NAME, "job.yaml", "--cpu")
    wait_until(lambda: list((host.home / "launch" / "runs").glob("*/metrics/*")))
    kill(processes_of(host))  # as a power cut ends them
    _, errors = client.communicate(timeout=120)
    assert client.returncode == 0, errors
    assert f"{NAME} restarted, or the job's supervisor was killed" in errors
    assert len(jobs_on(host)) == 2


@pytest.mark.slow
def test_a_cancelled_run_is_resumed_only_if_it_is_asked_for(host: SshServer, job: Callable[[float], Path]) -> None:
    job(30)
    detached = launch("on", NAME, "job.yaml", "--cpu", "--detach")
    assert detached.returncode == 0, detached.stderr
    run = jobs_on(host)[0]["run"]
    assert f"launch follow {run}" in detached.stdout
    assert "cancelled" in launch("cancel", run).stdout
    refused = launch("on", NAME, "job.yaml", "--cpu")
    assert refused.returncode != 0
    assert f"launch on {NAME} SPEC --resume {run}" in refused.stderr
    resumed = launch("on", NAME, "job.yaml", "--cpu", "--resume", run, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    assert len(jobs_on(host)) == 2


@pytest.mark.slow
def test_another_name_of_the_host_finds_the_same_job(
    host: SshServer, job: Callable[[float], Path], tmp_path: Path
) -> None:
    settings = tmp_path / "ssh_config"
    settings.write_text(settings.read_text().replace(f"Host {NAME}", f"Host {NAME} other"))
    job(15)
    assert launch("on", NAME, "job.yaml", "--cpu", "--detach").returncode == 0
    seen = launch("on", "other", "job.yaml", "--cpu", "--detach")
    assert seen.returncode == 0, seen.stderr
    assert "cancelling" not in seen.stderr
    assert [path.name for path in (host.home / "launch" / "jobs").glob("*/cancel")] == []
    assert len(jobs_on(host)) == 1


@pytest.mark.slow
def test_a_cancelled_job_whose_supervisor_dies_stays_cancelled(host: SshServer) -> None:
    service, job = OnHost(connect_to(NAME)), create(host_request("import time; time.sleep(60)"))
    (host.home / "launch" / "jobs" / job.id / "cancel").touch()
    kill(processes_of(host))
    wait_until(lambda: service.get(job.name).is_over)
    ended = service.get(job.name)
    assert ended.state == "CANCELLED"
    assert ended.ended


def test_clean_removes_what_no_job_and_no_run_needs(host: SshServer) -> None:
    old = host.home / "launch" / "code" / "old"
    old.mkdir(parents=True)
    (old / "file").write_text("x" * 1000)
    os.utime(old, (0, 0))
    listed = launch("on", NAME, "--clean", "--dry-run")
    assert listed.stdout == f"1 code version: 1.0 kB\nwould remove 1.0 kB below {NAME}:~/launch\n"
    assert old.exists()
    cleaned = launch("on", NAME, "--clean", "-o", "json")
    assert json.loads(cleaned.stdout) == {"removed": [{"path": "code/old", "bytes": 1000}], "dry_run": False}
    assert not old.exists()
    assert "a spec cannot be combined with --clean" in launch("on", NAME, "job.yaml", "--clean").stderr
    assert "--gpus cannot be combined with --clean" in launch("on", NAME, "--clean", "--gpus", "2").stderr


# --- The host's side --------------------------------------------------------------------------------------------------


def create(body: dict[str, Any], request_id: str = "") -> Any:
    return OnHost(connect_to(NAME)).create(planned().attempts[0], body, request_id or str(uuid.uuid4()))


def test_a_repeated_request_starts_nothing(host: SshServer) -> None:
    body, request_id = host_request("import time; time.sleep(60)"), str(uuid.uuid4())
    assert create(body, request_id) == create(body, request_id)
    assert len(jobs_on(host)) == 1


def test_a_run_has_one_job_at_a_time(host: SshServer) -> None:
    create(host_request("import time; time.sleep(60)"))
    with pytest.raises(LaunchError, match="tiny-0123abcd is already running here"):
        create(host_request("print()"))
    assert len(jobs_on(host)) == 1


def test_a_job_whose_environment_is_gone_is_refused_with_what_makes_it_again(host: SshServer) -> None:
    with pytest.raises(LaunchError, match="the job's Python /nonexistent/python does not exist") as refused:
        create(host_request("print()", python="/nonexistent/python"))
    assert "makes its environment again" in refused.value.hint
    assert jobs_on(host) == []


def test_a_job_ends_at_its_time_limit(host: SshServer) -> None:
    body = host_request("import time; time.sleep(60)")
    body["job"]["jobSpec"]["scheduling"]["timeout"] = "1s"
    service, job = OnHost(connect_to(NAME)), create(body)
    wait_until(lambda: service.get(job.name).is_over)
    assert service.get(job.name).state == "EXPIRED"


SMI = """
case "$*" in
*query-gpu*) printf '0, GPU-a, NVIDIA L4, 23034, 0, 550.54, 8.9\\n1, GPU-b, NVIDIA L4, 23034, 9000, 550.54, 8.9\\n' ;;
*) printf 'GPU-b, 1\\n' ;;
esac
"""


def test_only_free_gpus_are_taken(host: SshServer, hosts_yaml: Path) -> None:
    host.program("nvidia-smi", SMI)
    body = host_request("import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(60)")
    body["job"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["acceleratorCount"] = 1
    job = create(body)
    output = host.home / "launch" / "jobs" / job.id / "output.log"
    wait_until(output.read_text)
    assert output.read_text() == "0\n"
    hosts_yaml.write_text(f"l4s: {{host: {NAME}, gpus: 2}}\n")
    seen = launch("gpus", "--on", "l4s")
    assert seen.stdout.splitlines()[-1] == f"hosts.yaml: host {NAME}, gpus 2"
    assert seen.stdout.splitlines()[:2] == [
        "0  NVIDIA L4, 22 GiB, driver 550.54: run tiny-0123abcd",
        "1  NVIDIA L4, 22 GiB, driver 550.54: root (8.8 GiB)",
    ]
    facts = Agent(connect_to(NAME)).call("describe")
    with pytest.raises(NoCapacity, match="GPU 1: root"):
        check_free_gpus(facts["gpus"], "", 1, NAME)
    with pytest.raises(LaunchError, match="has 2 GPUs; the job needs 3"):
        check_free_gpus(facts["gpus"], "", 3, NAME)
    with pytest.raises(LaunchError, match="no usable GPU"):
        check_free_gpus([], "nvidia-smi is not installed", 1, NAME)
    assert (machine.run_of_gpu("GPU-a"), machine.run_of_gpu("GPU-b")) == ("tiny-0123abcd", "")


# --- Connections ------------------------------------------------------------------------------------------------------


def test_an_unknown_host_key_is_shown_and_must_be_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_host(tmp_path, monkeypatch, python=sys.executable, known=False):
        with pytest.raises(NotAuthorised, match="is not a known host; its key is ssh-ed25519 SHA256:"):
            reach(NAME)
        known = tmp_path / "known_hosts"
        assert f"launch gpus --on {NAME} --accept-host-key" in launch("gpus", "--on", NAME).stderr
        assert known.read_text() == ""
        for words in (("gpus", "--on", NAME), ("runs", "--on", NAME)):
            accepted = launch(*words, "--accept-host-key")
            assert accepted.returncode == 0, accepted.stderr
            assert known.read_text()
            Connection(Host(NAME)).close()
            reach(NAME)
            Connection(Host(NAME)).close()
            known.write_text("")
    assert "--accept-host-key needs a host" in launch("gpus", "--accept-host-key").stderr


def test_a_changed_host_key_is_refused(host: SshServer, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    other = (tmp_path / "key.pub").read_text().split()[1]
    known.write_text(f"{NAME} ssh-ed25519 {other}\n")
    with pytest.raises(NotAuthorised, match="has changed"):
        reach(NAME, accept_host_key=True)


def test_a_refused_login_says_what_to_do(host: SshServer) -> None:
    (host.folder / "authorized_keys").write_text("")
    with pytest.raises(NotAuthorised, match="refuses the login") as refused:
        reach(NAME)
    assert "ssh-copy-id" in refused.value.hint


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a b", "me@", "host:port", "", "a\x1b[0m", "colab:", "colab:-oX", "colab:a'b"]
)
def test_a_name_that_is_no_host_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="invalid host"):
        _ = Host(name).words


def test_a_colab_session_is_a_host() -> None:
    assert Host("colab:run1").words == ("--", "root@colab-run1")
    assert 'ProxyCommand="colab ssh --proxy-mode -s run1"' in Host("colab:run1").ssh_text
    assert Host("colab:2222").words == ("-p", "2222", "--", "colab")
    assert host_and_run("colab:run1:train") == ("colab:run1", "train")
    assert host_and_run("ssh://colab:run1/~/launch/runs/train-1") == ("colab:run1", "train-1")


def test_launch_train_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_host(tmp_path, monkeypatch, sends_trainer=True) as server:
        agent = Agent(connect_to(NAME))
        assert agent.call("jobs", {"ids": None}) == []
        assert (server.home / "launch" / "trainer" / trainer_digest() / "launch_train" / "host" / "job.py").is_file()
        monkeypatch.setattr(Agent, "send_trainer", lambda _self: pytest.fail("it was sent again"))
        assert agent.call("jobs", {"ids": None}) == []


QUICK = """
name: quick
machine: {type: l4, gpus: 1}
run:
  config:
    model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 32, block_size: 32}
    data: {path: text.txt}
    steps: 60
    batch_size: 8
    log_every: 1
"""


@pytest.mark.slow
def test_a_run_that_is_cancelled_moved_and_finished_here_has_the_losses_of_an_undisturbed_one(
    host: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "moved"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    (folder / "job.yaml").write_text(QUICK)
    assert launch("on", NAME, "job.yaml", "--cpu", "--detach").returncode == 0
    run = jobs_on(host)[0]["run"]
    folder_there = host.home / "launch" / "runs" / run
    wait_until(lambda: any(b'"loss"' in path.read_bytes() for path in folder_there.glob("metrics/*")))
    assert launch("cancel", run).returncode == 0
    moved = launch("move", run)
    assert moved.returncode == 0, moved.stderr
    assert f"moved to runs/{run}" in moved.stdout
    refused = launch("on", NAME, "job.yaml", "--cpu", "--resume", run)
    assert "the run was moved to" in refused.stderr
    ended = launch("local", "job.yaml")
    assert ended.returncode == 0, ended.stderr
    assert "attempt 2 of this run; it resumes from its newest checkpoint" in ended.stderr
    whole = launch("local", "job.yaml", "--output", str(tmp_path / "undisturbed"))
    assert whole.returncode == 0, whole.stderr
    undisturbed = next((tmp_path / "undisturbed").iterdir())
    assert losses(folder / "runs" / run) == losses(undisturbed)
    assert [*losses(undisturbed)] == [*range(1, 61)]


def losses(folder: Path) -> dict[int, float]:
    rows = [start.rows for start in read_run(LocalFolder(folder)).starts]
    return {step: loss for each in rows for step, loss in zip(each.steps, each.values.get("loss", ()), strict=False)}


@pytest.mark.slow
def test_random_kills_cost_no_step_and_make_no_second_run(
    host: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the client, the connection, the supervisor, the node, or all: the losses are those of an undisturbed run."""
    chance = random.Random(int(os.environ.get("LAUNCH_TEST_SEED", "1")))
    folder = tmp_path / "killed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    (folder / "job.yaml").write_text(QUICK.replace("steps: 60", "steps: 120\n    checkpoint: {minutes: 0.05}"))
    kinds = chance.sample(["client", "connection", "supervisor", "node", "all"], 3)
    words = ["on", NAME, "job.yaml", "--cpu"]
    for kind in kinds:
        client = started(*words)
        with suppress(subprocess.TimeoutExpired):
            client.wait(chance.uniform(4, 12))
        if kind in ("client", "all"):
            client.kill()
        if kind == "connection":
            Connection(Host(NAME)).close()
        if kind in ("supervisor", "node", "all"):
            part = {"supervisor": b"launch_train.host", "node": b"launch_train.node"}.get(kind, b"")
            kill(processes_of(host, part))
        with suppress(subprocess.TimeoutExpired):
            client.wait(chance.uniform(0, 2))
        client.kill()
        client.communicate()
    ended = launch(*words)
    run = jobs_on(host)[0]["run"]
    if ended.returncode:
        ended = launch(*words, "--resume", run)
    assert ended.returncode == 0, ended.stderr
    assert {job["run"] for job in jobs_on(host)} == {run}
    whole = launch("local", "job.yaml")
    assert whole.returncode == 0, whole.stderr
    undisturbed = next((folder / "runs").iterdir())
    assert losses(host.home / "launch" / "runs" / run) == losses(undisturbed)
    assert [*losses(undisturbed)] == [*range(1, 121)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["job.yaml"], "job.yaml is a spec, not a host"),
        (["a b", "job.yaml"], "invalid host 'a b'"),
        (["box", "job.yaml", "--spot"], "--spot cannot be combined with launch on"),
        (["box", "job.yaml", "--usd", "5"], "the price of the host is unknown, so limits.usd cannot be checked"),
        (["box", "job.yaml", "--usd", "5", "--price", "3"], "this run could cost $72.00, more than limits.usd ($5.00)"),
        (["box", "job.yaml", "--nodes", "2"], "the job has 2 nodes, but one host is named"),
        (["a,b", "job.yaml", "--nodes", "3"], "the job has 3 nodes, but 2 hosts are named"),
        (["a,b,a", "job.yaml"], "a,b,a names a host twice"),
        (["a,", "job.yaml"], "a host is missing in 'a,'"),
        (["a,colab:x", "job.yaml"], "colab:x is a Colab runtime, which other hosts can't reach"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_before_a_connection(
    job: Callable[[float], Path], words: list[str], problem: str
) -> None:
    job(1)
    refused = launch("on", *words, "--dry-run")
    assert refused.returncode == 2
    assert problem in refused.stderr

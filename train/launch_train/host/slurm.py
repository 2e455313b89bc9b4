"""One job on a Slurm cluster: queued exactly once, run by its batch script, requeued after a preemption.

The folder of a job, <root>/jobs/ID, is on a disk that the login node and the compute nodes share:

    job.json    what was submitted, written first and only once
    script      the batch script, as the request has it
    run, node   start launch_train.host on a compute node: for the batch script, and for each node
    slurm.json  the number of the one Slurm job that may run it; then the state in which that ended
    starts.json when each start began, and until when it was seen
    output.log  what the batch script and the nodes print
    cancel      exists once the job is cancelled
    end.json    how it ended

Slurm's SIGTERM reaches every process of a job, also the DataLoader workers that a rank needs for its last step. So the
nodes are told to save by SIGURG, which every other process ignores.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from launch_train.common import contract
from launch_train.host import machine
from launch_train.host.container import LOGIN_ONLY, PYXIS, pyxis_options
from launch_train.host.errors import RefusedError
from launch_train.host.folder_server import MARK
from launch_train.host.job import KEPT as KEPT_OF_LOGIN
from launch_train.host.job import SEEN_SECONDS, create_file, make_workdir, node_command, placed_command

POLL_SECONDS: Final = 0.5
COMMAND_SECONDS: Final = 50.0
REQUEUE_SECONDS: Final = 30.0
"""Within this time Slurm stops the batch script of a job that it queues again."""
LEAST_SECONDS: Final = 60.0
"""Time of the run below which a requeue isn't worth it."""
FIRST_PORT, PORTS = 20000, 12000
"""Ports of the control store, by the number of the Slurm job; below the ports of outgoing connections."""
KEPT: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TMPDIR", "SLURM_JOB_ID")
FABRIC: Final = ("NCCL_", "FI_", "UCX_", "GLOO_")
"""Beginnings of the variables by which a cluster sets its network; a job's own win."""
OF_PYXIS: Final = ("SLURM_", "LAUNCH_", "ENROOT_", "NVIDIA_")
RANKS: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Pyxis and Enroot set them for images with PyTorch; torchrun sets its own."""
ENDED: Final = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT", "UNKNOWN"),
    }
)
"""Final states of a Slurm job (squeue(1), JOB STATE CODES), and launch's own for a job that Slurm does not know."""
WAITING: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
HELD: Final = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States that wait and that `scancel --state=PENDING` leaves."""
STOPPED_CODES: Final = frozenset({contract.Exit.PREEMPTED, 128 + signal.SIGTERM, 128 + signal.SIGKILL})
"""Exit codes of nodes that were stopped: 75 after saving, 143 and 137 if there was nothing to save yet."""
RESEND_SECONDS: Final = 3.0
"""Pause before the signal to save is sent again: scancel may have failed, and a node that is starting ignores it."""
SIGNAL_SECONDS: Final = 10.0
"""Timeout of scancel, which retries for longer while a job is completing, and of sinfo."""
SRUN_ERROR: Final = re.compile(r"srun: error: (.*)")
PYXIS_ERROR: Final = re.compile(r"slurmstepd\S*: error: pyxis: (.*)")
ENROOT_ERROR: Final = re.compile(r"slurmstepd\S*: error: pyxis: +\[ERROR\] (.*)")
REQUEUE_PAUSES: Final = (1.0, 3.0, 6.0)
LOGIN_SCRIPT: Final = """unset ${!SQUEUE_@} ${!SCANCEL_@} ${!SACCT_@}; printf '\\002launch\\002\\n'; exec "$0" "$@\""""
"""Of a login shell: its profile may print a text, and set defaults of the user."""
UNKNOWN: Final = (
    *("timed out", "ontact slurm controller", "Connection refused", "try again later", "Zero Bytes"),
    *("onnection failure", "eceive failure", "no number"),
)
"""Parts of sbatch's errors after which the job may have been queued."""
UNRECORDED_SECONDS: Final = 120.0
"""After this time, a job whose number is unknown and that Slurm doesn't list was never queued."""
GPU_FIX: Final = "See the cluster's GPUs: sinfo -o '%P %G %l'; name one: --set slurm.gpu_type=NAME"
FIXES: Final = {
    "node configuration is not available": GPU_FIX,
    "Invalid generic resource": GPU_FIX,
    "invalid partition": "See the partitions: sinfo -s; name one: --partition NAME",
    "account": "See your accounts: sacctmgr show associations user=$USER; name one: --account NAME",
    "time limit": "See the partition's limit: sinfo -o '%P %l'; requeue below it: --set slurm.hours=H",
    "QOS": "See your limits: sacctmgr show associations user=$USER; name a QOS: --set slurm.options=[--qos=NAME]",
}
"""A part of sbatch's refusal, and its fix."""


class SlurmError(Exception):
    """A command of Slurm failed, or Slurm isn't installed."""


def command_words(*argv: str) -> tuple[str, ...]:
    """Return the command line for a command of Slurm, which prints MARK before its answer if a login shell runs it,
    because it isn't on PATH: a profile may add it."""
    return argv if shutil.which(argv[0]) else ("bash", "-lc", LOGIN_SCRIPT, *argv)


def command_environment(program: str) -> dict[str, str]:
    """Return the environment of a command of Slurm: without the user's filters of squeue, and for sbatch without the
    variables of the Slurm job in which launch itself may run, which the new job would get."""
    prefixes = ("SQUEUE_", "SCANCEL_", "SACCT_", *(("SLURM_",) if program == "sbatch" else ()))
    kept = ("SLURM_CONF", "SLURM_JWT")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(prefixes)}


def without_profile(stdout: str) -> str:
    """Return a command's output without what a login shell's profile printed before it."""
    before, mark, after = stdout.partition(MARK.decode())
    return after if mark else before


def slurm(*argv: str, check: bool = True, seconds: float = COMMAND_SECONDS) -> str:
    """Run a command of Slurm and return its output; without `check`, also if it fails. Raises SlurmError,
    TimeoutExpired."""
    ran = subprocess.run(
        command_words(*argv),
        env=command_environment(argv[0]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if ran.returncode == 127:
        raise SlurmError(f"{argv[0]} is not installed here, or not on the PATH of a login")
    if ran.returncode and check:
        lines = [line.removeprefix(f"{argv[0]}: ").removeprefix("error: ") for line in ran.stderr.splitlines()]
        raise SlurmError("; ".join(filter(None, lines)) or f"{argv[0]} exited with {ran.returncode}")
    return without_profile(ran.stdout)


def problem_of_slurm() -> str:
    """Return why Slurm takes no job here now; empty: it answers."""
    try:
        slurm("sinfo", "--noheader", "--summarize", seconds=SIGNAL_SECONDS)
    except (SlurmError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


def try_slurm(*argv: str) -> bool:
    """Run a command of Slurm and return whether it succeeded in SIGNAL_SECONDS."""
    with suppress(SlurmError, subprocess.TimeoutExpired):
        slurm(*argv, seconds=SIGNAL_SECONDS)
        return True
    return False


def submit_job(root: Path, request: Mapping[str, Any]) -> None:
    """Queue a job, unless it was queued before. A request with secrets is no job for Slurm: plans refuse it.

    Raises RefusedError: Slurm refuses it, and its record is removed. SlurmError, TimeoutExpired: Slurm does not
    answer, and it is unknown whether it was queued.
    """
    job = {name: value for name, value in request.items() if name != "secrets"}
    folder = root / "jobs" / str(job["id"])
    folder.mkdir(parents=True, exist_ok=True)
    lock = machine.lock_file(folder / "lock", str(job["run"]))
    if lock is None:
        raise SlurmError("the job is being submitted by another process")
    try:
        create_file(folder / "job.json", json.dumps({**job, "created": time.time(), "machine": os.uname().nodename}))
        write_programs(root, folder, job)
        if (folder / "slurm.json").exists():
            return
        number = queued_number(job)
        if number is None:
            words = [f"--comment=launch-job={job['id']}", f"--output={folder}/output.log", f"--chdir={root}"]
            try:
                number = submitted_number(slurm("sbatch", "--parsable", *words, str(folder / "script"), str(folder)))
            except SlurmError as error:
                if any(part in str(error) for part in UNKNOWN):
                    raise
                shutil.rmtree(folder)
                raise refusal(error) from error
        if not create_file(folder / "slurm.json", json.dumps({"number": number})) and number != recorded_number(folder):
            slurm("scancel", str(number), check=False)  # an earlier submission has begun to run
    finally:
        os.close(lock)


def submitted_number(text: str) -> int:
    """Return the number of the job in sbatch's answer; a site's filter may print its own text before. Raises
    SlurmError."""
    number = (text.split() or [""])[-1].partition(";")[0]
    if not number.isdecimal():
        raise SlurmError(f"no number of a job is in sbatch's answer: {text.strip()[-200:]}")
    return int(number)


def write_programs(root: Path, folder: Path, job: Mapping[str, Any]) -> None:
    """Write a job's batch script, the program that it calls, and the one that srun starts on each node; of a job in a
    container, only Pyxis starts that inside, where the job's Python is."""
    container = job.get("container") or {}
    is_inside = container.get("runtime") == PYXIS
    in_batch = sys.executable if container else str(job["python"])
    in_node = str(Path(job["python"]).expanduser()) if is_inside else in_batch
    trainer = shlex.quote(str(root / "trainer" / str(job["trainer"])))
    # Enroot sets another HOME if it maps the account; the image's own modules stay.
    own = f'export HOME={shlex.quote(str(Path.home()))}; PYTHONPATH="{trainer}${{PYTHONPATH:+:$PYTHONPATH}}"'
    programs = {"script": str(job["script"])}
    for name, python, setting in (
        ("run", in_batch, f"PYTHONPATH={trainer}"),
        ("node", in_node, own if is_inside else f"PYTHONPATH={trainer}"),
    ):
        words = shlex.join([python, "-m", "launch_train.host", str(root)])
        text = f'{setting}; export PYTHONPATH\nexec {words} "$1" {shlex.quote(str(job["id"]))}\n'
        programs[name] = f"#!/bin/sh\nunset PYTHONSAFEPATH\n{text}"
    for name, text in programs.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)


def queued_number(job: Mapping[str, Any]) -> int | None:
    """Return the number of the Slurm job by which a job was queued although sbatch's answer was lost."""
    name = f"--name=launch-{job['run']}"
    for line in slurm("squeue", "--noheader", "--all", "--states=all", name, "--format=%A %k").splitlines():
        number, _, comment = line.strip().partition(" ")
        if comment == f"launch-job={job['id']}":
            return int(number)
    return None


def recorded_number(folder: Path) -> int | None:
    """Return the number of the Slurm job that may run a job; None: none is recorded."""
    with suppress(OSError, ValueError):
        return int(json.loads((folder / "slurm.json").read_bytes())["number"])
    return None


def test_job(script: str) -> str:
    """Return when and where Slurm would start a batch script, in its words. Raises RefusedError, SlurmError."""
    words = command_words("sbatch", "--test-only")
    env = command_environment("sbatch")
    ran = subprocess.run(
        words, env=env, input=script, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    text = (without_profile(ran.stdout) + ran.stderr).replace("sbatch: ", "").replace("error: ", "").strip()
    if ran.returncode:
        raise refusal(SlurmError(text))
    return text


def refusal(error: SlurmError) -> RefusedError:
    """Return the refusal of a job, with its fix."""
    text = str(error)
    fix = next((fix for part, fix in FIXES.items() if part.lower() in text.lower()), "")
    return RefusedError(text if "not installed" in text else f"Slurm refuses the job: {text}", fix)


# --- State -------------------------------------------------------------------------------------------------------


def add_states(root: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add Slurm's facts to the described jobs that it runs: `running`, `slurm` (its state), `number`, `reason` (why it
    waits; empty: it does not), `started` (Unix time of the first start, later by the waits between starts, which cost
    nothing; null: none yet) and `seen`."""
    of_slurm = [job for job in jobs if job.get("script")]
    states = slurm_states(root, of_slurm) if of_slurm else {}
    for job in of_slurm:
        folder = root / "jobs" / job["id"]
        state, reason = states.get(job["id"], ("UNKNOWN", ""))
        number = recorded_number(folder)
        if job["cancelled"] and state in WAITING and number:  # the first scancel came too early or failed
            try_slurm("scancel", *(() if state in HELD else ("--state=PENDING",)), str(number))
        starts, record = read_starts(folder), folder / "slurm.json"
        waited = sum(later["begin"] - earlier["seen"] for earlier, later in pairwise(starts))
        with suppress(OSError, ValueError):  # it may have ended since it was described
            job["end"] = json.loads((folder / "end.json").read_bytes())
        job |= {
            "running": state not in ENDED,
            "slurm": state,
            "number": number,
            "reason": reason if state in WAITING else "",
            "started": starts[0]["begin"] + waited if starts else None,
            # Of a job that never started: when its final state was recorded.
            "seen": starts[-1]["seen"] if starts else record.stat().st_mtime if record.exists() else time.time(),
        }
    return jobs


def slurm_states(root: Path, jobs: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return Slurm's state of each job and the reason for which it waits, by the job's id.

    Final states are recorded in the jobs' folders, because Slurm forgets them (MinJobAge). Raises SlurmError: Slurm
    does not answer.
    """
    states: dict[str, tuple[str, str]] = {}
    job_ids: dict[int, str] = {}
    for job in jobs:
        folder = root / "jobs" / job["id"]
        record = {}
        with suppress(OSError, ValueError):
            record = json.loads((folder / "slurm.json").read_bytes())
        number = record.get("number") or (queued_number(job) if not record else None)
        if state := record.get("state"):
            states[job["id"]] = state, ""
        elif number is not None:
            create_file(folder / "slurm.json", json.dumps({"number": number}))
            job_ids[number] = job["id"]
        elif time.time() - job["created"] < UNRECORDED_SECONDS:
            states[job["id"]] = "PENDING", "it is being queued"
        else:  # no Slurm job may run it from now on
            create_file(folder / "slurm.json", json.dumps({"number": 0, "state": "UNKNOWN"}))
            states[job["id"]] = "UNKNOWN", ""
    if not job_ids:
        return states
    names = ",".join({f"launch-{job['run']}" for job in jobs})
    rows = slurm("squeue", "--noheader", "--all", "--states=all", f"--name={names}", "--format=%A|%T|%r").splitlines()
    fields = [row.strip().split("|", 2) for row in rows if row.count("|") >= 2]
    answers = {int(number): (state, reason) for number, state, reason in fields if number.isdecimal()}
    for number, job_id in job_ids.items():
        state, reason = answers.get(number) or (accounted_state(number), "")
        states[job_id] = state, reason
        if state in ENDED - {"UNKNOWN"}:
            path = root / "jobs" / job_id / "slurm.json"
            written = path.with_name(f".slurm-{os.uname().nodename}-{os.getpid()}")
            written.write_text(json.dumps({"number": number, "state": state}), encoding="utf-8")
            written.rename(path)
    return states


def accounted_state(number: int) -> str:
    """Return the state of a job that Slurm's controller has forgotten, as its accounting has it; UNKNOWN if there is
    none."""
    with suppress(OSError, SlurmError, subprocess.TimeoutExpired):
        words = ("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={number}", "--format=State")
        return (slurm(*words).split() or ["UNKNOWN"])[0].rstrip("+")
    return "UNKNOWN"


def cancel_job(root: Path, name: str) -> None:
    """Begin to cancel a job: if it waits, Slurm removes it; if it runs, its batch script lets the nodes save."""
    number = recorded_number(root / "jobs" / name)
    if number is not None:
        slurm("scancel", "--state=PENDING", str(number), check=False)
        slurm("scancel", "--batch", "--signal=USR2", str(number), check=False)


# --- On the compute nodes ----------------------------------------------------------------------------------------


def run_batch(root: Path, name: str) -> int:
    """Run the nodes of a job to their end and return the exit code; what the batch script of a Slurm job does.

    On a preemption and at the end of the Slurm job's time the nodes save and exit with 75; then the job is queued again
    under the same number.
    """
    folder, number = root / "jobs" / name, int(os.environ["SLURM_JOB_ID"])
    job = json.loads((folder / "job.json").read_bytes())
    create_file(folder / "slurm.json", json.dumps({"number": number}))  # sbatch's answer may have been lost
    if was_interrupted(folder, number):  # Slurm itself has queued it again
        (folder / "end.json").unlink()
    if recorded_number(folder) != number or (folder / "end.json").exists():
        print(
            f"launch: job {number} ends at once: this run's job is {recorded_number(folder)}, and each runs once",
            flush=True,
        )
        return 0
    signals: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda signum, _frame: signals.append(signum))
    starts = read_starts(folder)
    seconds = float(job["hours"]) * 3600 - sum(start["seen"] - start["begin"] for start in starts)
    code, stopped = 0, "cancelled"
    if not (folder / "cancel").exists():
        code, stopped = run_nodes(folder, job, signals, [*starts, {"begin": time.time(), "seen": 0.0}], seconds)
    signals.clear()
    if stopped == "interrupted" and code in STOPPED_CODES and is_requeued(number):
        # Without an end: Slurm starts the job again. A batch script that exits before Slurm stops it has failed.
        until = time.monotonic() + REQUEUE_SECONDS
        while signal.SIGTERM not in signals and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return 0
    end = {"code": code, "stopped": stopped, "time": time.time(), "problem": ""}
    if code and not stopped and not any((root / "work").glob(f"{name}-*")):  # no node has begun
        with suppress(OSError):
            lines = (folder / "output.log").read_text(encoding="utf-8", errors="replace").splitlines()
            for error in (ENROOT_ERROR, PYXIS_ERROR, SRUN_ERROR):  # the first of one kind says most
                end["problem"] = end["problem"] or next((match[1] for match in map(error.match, lines) if match), "")
    (folder / ".end").write_text(json.dumps(end), encoding="utf-8")
    (folder / ".end").rename(folder / "end.json")
    # Slurm 24.11 would repeat the requeue of an earlier preemption.
    try_slurm("scontrol", "update", f"JobId={number}", "Requeue=0")
    for workdir in (root / "work").glob(f"{name}-*"):
        shutil.rmtree(workdir, ignore_errors=True)
    return code


def was_interrupted(folder: Path, number: int) -> bool:
    """Return whether this Slurm job was stopped from outside in its last start, and nobody has read that as its end."""
    with suppress(OSError, ValueError):
        end = json.loads((folder / "end.json").read_bytes())
        record = json.loads((folder / "slurm.json").read_bytes())
        return bool(end["stopped"] == "interrupted" and record == {"number": number})
    return False


def is_requeued(number: int) -> bool:
    """Queue this Slurm job again if it runs; return whether Slurm has done that."""
    for pause in (*REQUEUE_PAUSES, None):
        state = slurm_state(number)
        if state and state != "RUNNING":  # cancelled, or Slurm itself queues it again
            return False
        try:
            slurm("scontrol", "requeue", str(number))
        except (SlurmError, subprocess.TimeoutExpired) as error:
            print(f"launch: Slurm does not queue the job again: {error}", flush=True)
        else:
            return True
        if pause:
            time.sleep(pause)
    return False


def run_nodes(
    folder: Path, job: Mapping[str, Any], signals: list[int], starts: list[dict[str, float]], seconds: float
) -> tuple[int, str]:
    """Run a job's nodes for at most `seconds`; return the exit code, and why they were stopped (empty: they were
    not). `starts` is written to starts.json, the last of them is this."""
    hosts = slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    words = [
        "srun",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--export=ALL",  # also if the site's default for jobs is NONE
        "--cpu-bind=none",  # srun doesn't know sbatch's --cpus-per-task: it would bind all processes to one core
    ]
    number, env = os.environ["SLURM_JOB_ID"], {**os.environ, "LAUNCH_HOSTS": ",".join(hosts)}
    if pyxis := pyxis_options(job, folder.parents[1]):  # what a container gets besides the image's variables
        kept = (KEPT_OF_LOGIN - LOGIN_ONLY) | {"PATH", *KEPT}
        env = {name: env[name] for name in env if name in kept or name.startswith((*FABRIC, *OF_PYXIS))}
        if int(job["gpus"]):  # else Enroot shows none to an image without these
            env = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **env}
    srun = subprocess.Popen([*words, *pyxis, str(folder / "node"), "node"], env=env, start_new_session=True)
    began, stopped, kill_at = time.monotonic(), "", float("inf")
    written, send_at = 0.0, began
    while (code := srun.poll()) is None:
        now = time.monotonic()
        stopped = stopped or stop_reason(folder, signals, now - began > seconds)
        if stopped and now >= send_at:
            if try_slurm("scancel", "--signal=URG", number):
                kill_at = min(kill_at, time.monotonic() + contract.NOTICE_SECONDS)
            send_at = time.monotonic() + RESEND_SECONDS
        if now > kill_at:
            try_slurm("scancel", "--signal=KILL", number)
            kill_at = time.monotonic() + contract.NOTICE_SECONDS
        if now - written >= SEEN_SECONDS:
            written, starts[-1]["seen"] = now, time.time()
            write_starts(folder, starts)
        time.sleep(POLL_SECONDS)
    starts[-1]["seen"] = time.time()
    write_starts(folder, starts)
    if not code:  # it was complete before it could stop
        return code, ""
    if stopped == "interrupted" and seconds - (time.monotonic() - began) < LEAST_SECONDS:
        stopped = "expired"
    if not stopped and code == contract.Exit.PREEMPTED:  # Slurm's own signal reached the nodes
        stopped = "interrupted"
    return code, "cancelled" if (folder / "cancel").exists() else stopped


def stop_reason(folder: Path, signals: list[int], is_expired: bool) -> str:
    """Return why the nodes must stop; empty: they need not."""
    with suppress(OSError):
        os.scandir(folder).close()  # NFS may otherwise answer from its cache that a file is absent
    if (folder / "cancel").exists():
        return "cancelled"
    if is_expired:
        return "expired"
    return "interrupted" if {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT} & set(signals) else ""


def run_node(root: Path, name: str) -> None:
    """Become the node of a job on this machine; what srun starts on each."""
    folder = root / "jobs" / name
    job = json.loads((folder / "job.json").read_bytes())
    index, start = int(os.environ["SLURM_PROCID"]), os.environ.get("SLURM_RESTART_COUNT", "0")
    argv, variables, _ = placed_command(job)
    is_inside = bool(job.get("container")) and job["container"]["runtime"] == PYXIS  # with the image's variables
    network = {key: value for key, value in os.environ.items() if key.startswith(FABRIC) or key in KEPT}
    if is_inside:
        job = {**job, "python": sys.executable}  # as the image's PATH has it
        own = {key: value for key, value in os.environ.items() if key not in RANKS and not key.startswith(OF_PYXIS)}
        network = own | network | {"PYTHONNOUSERSITE": "1"}
    if not int(job["gpus"]):
        network["CUDA_VISIBLE_DEVICES"] = ""
    variables[contract.CLUSTER_SPEC] = cluster_spec(variables[contract.CLUSTER_SPEC], index)
    workdir = make_workdir(root, job, f"{name}-{start}-{index}")
    argv, env = node_command(root, job, workdir, argv, network | variables)
    os.chdir(workdir)
    os.umask(0o022)
    sys.stdout.flush()
    program = shutil.which(argv[0], path=env["PATH"]) or argv[0]
    os.execve(program, argv, env)  # noqa: S606 - the job is the user's own program


def cluster_spec(text: str, index: int) -> str:
    """Return CLUSTER_SPEC of one node: that of the request, with the addresses of the Slurm job's nodes."""
    spec = json.loads(text)
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % PORTS
    first, *others = (f"{host}:{port}" for host in os.environ["LAUNCH_HOSTS"].split(","))
    spec["cluster"] = {"workerpool0": [first], **({"workerpool1": others} if others else {})}
    spec["task"] |= {"type": "workerpool0", "index": 0} if index == 0 else {"type": "workerpool1", "index": index - 1}
    return json.dumps(spec)


def slurm_state(number: int) -> str:
    """Return a job's state in Slurm; empty if it does not answer."""
    with suppress(SlurmError, subprocess.TimeoutExpired):
        return slurm("squeue", "--noheader", "--all", f"--jobs={number}", "--format=%T").strip()
    return ""


def read_starts(folder: Path) -> list[dict[str, float]]:
    """Return when each start of a job began, and until when it was seen, in Unix time."""
    with suppress(OSError, ValueError):
        starts: list[dict[str, float]] = json.loads((folder / "starts.json").read_bytes())
        return starts
    return []


def write_starts(folder: Path, starts: list[dict[str, float]]) -> None:
    """Write starts.json, whole. A full disk does not end the run."""
    with suppress(OSError):
        (folder / ".starts").write_text(json.dumps(starts), encoding="utf-8")
        (folder / ".starts").rename(folder / "starts.json")

"""One job on this machine: start it exactly once in a session of its own, supervise its node, record how it ended.

The folder of a job, <root>/jobs/ID:

    job.json    what was started, written first and only once
    lock        locked by the supervisor and the node as long as the job runs
    output.log  what the node and the supervisor print
    cancel      exists once the job is cancelled
    stop        exists once the job's node on another host has failed
    end.json    how it ended; without it and without the lock, the supervisor was killed or the machine restarted
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from launch_train.common import contract
from launch_train.host import container, machine
from launch_train.host.errors import RefusedError
from launch_train.host.login_session import leave_login_session
from launch_train.node.process import Child, adopt_orphans

POLL_SECONDS: Final = 0.2
SEEN_SECONDS: Final = 10.0
"""Interval in which the lock's time is renewed: when a job ended that was killed with its supervisor."""
RESERVED: Final = ".end"
"""Takes the space of end.json on the disk while the job runs."""
KEPT: Final = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "PATH", "LD_LIBRARY_PATH", "CUDA_HOME"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    }
)
"""Variables of the login that the job gets too. Credentials are not among them."""


def start_job(root: Path, request: Mapping[str, Any]) -> None:
    """Start a job, unless it was started before; return once its supervisor runs and has the GPUs.

    The values of `secrets` in the request go to the node alone, through memory; no file that has a name holds them.

    Raises RefusedError: it can't run here, or its run is running here. Then its record is removed.
    """
    job = {name: value for name, value in request.items() if name != "secrets"}
    folder = root / "jobs" / str(job["id"])
    folder.mkdir(parents=True, exist_ok=True)
    lock = machine.lock_file(folder / "lock", str(job["run"]))
    if lock is None:  # it runs, or is being started
        return
    if not create_file(
        folder / "job.json", json.dumps({**job, "created": time.time(), "machine": socket.gethostname()})
    ):
        os.close(lock)
        return
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.close(reading)
        detach(folder, root, job, request.get("secrets") or {}, lock, writing)
    os.close(lock)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        *_, last = ["", *(folder / "output.log").read_text(errors="replace").splitlines()]
        text = json.dumps({"refused": f"its supervisor failed: {last}", "fix": ""}).encode()
    if "refused" in (answer := json.loads(text)):
        shutil.rmtree(folder)
        raise RefusedError(answer["refused"], answer["fix"])


def create_file(path: Path, text: str) -> bool:
    """Write a new file, whole; return False if it exists."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def detach(folder: Path, root: Path, job: Mapping[str, Any], secrets: Mapping[str, str], lock: int, pipe: int) -> None:
    """Become the job's supervisor, without a terminal and in a session of its own, and never return."""
    os.setsid()
    if os.fork():
        os._exit(0)
    os.set_inheritable(pipe, False)
    output = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for handle in {int(link.name) for link in Path("/proc/self/fd").iterdir()} - {0, 1, 2, lock, pipe}:
        with suppress(OSError):  # the login's connection would stay open
            os.close(handle)
    try:
        supervise_node(folder, root, job, secrets, lock, pipe)
    except RefusedError as error:
        os.write(pipe, json.dumps({"refused": str(error), "fix": error.fix}).encode())
    except Exception:  # noqa: BLE001 - it is printed to the output of the job
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def supervise_node(
    folder: Path, root: Path, job: Mapping[str, Any], secrets: Mapping[str, str], lock: int, pipe: int
) -> None:
    """Take the locks and the GPUs, answer through the pipe, run the node to its end and record that.

    Raises RefusedError: before anything was started.
    """
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _frame: stops.append(signum))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_login_session(f"launch-{job['id']}.scope")
    argv, variables, place = placed_command(job)
    rank = int(job.get("rank", 0))  # of several nodes, the first has the run folder's lock
    locks = [lock_run(root, f"{job['run']}-{rank}", "") if rank else lock_run(root, str(job["run"]), place)]
    visible: dict[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
    if count := int(job["gpus"]):
        indices, handles, problem = machine.take_gpus(count, str(job["run"]))
        if problem:
            raise RefusedError(
                problem, "Wait for them, or ask for fewer: --gpus N. `launch gpus --on HOST` lists them."
            )
        locks += handles
        visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(indices)}
    if interface := next((name for name, address in machine.list_interfaces() if address == job.get("address")), ""):
        visible |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}  # other hosts reach its address
    workdir = make_workdir(root, job, str(job["id"]))
    if secrets:  # a container gets no other file of this process than its input
        secrets_file = open_in_memory(json.dumps(secrets))
        variables[contract.SECRETS_FILE] = "0" if job.get("container") else str(secrets_file)
        if job.get("container"):
            os.dup2(secrets_file, 0, inheritable=True)
    label = container_label(job)
    container.remove_containers(root, label)  # of an earlier start that was killed: this one has the run's lock
    argv, env = node_command(root, job, workdir, argv, visible | variables, label)
    os.chdir(workdir)
    for handle in (lock, *locks):  # the node may outlive a killed supervisor by the time of its save
        os.set_inheritable(handle, True)
    (folder / RESERVED).write_bytes(b" " * 1000)
    os.umask(0o022)
    adopt_orphans()
    began = time.monotonic()
    try:
        child = Child(argv, env)
    except OSError as error:
        raise RefusedError(f"{argv[0]} can't be started: {error.strerror}") from error
    if secrets:
        os.close(secrets_file)
    os.write(pipe, b"{}")
    os.close(pipe)
    code, stopped = wait_or_stop(child, folder, began + float(job["hours"]) * 3600, stops)
    if outlived_client(root, label) and code and not stopped:
        stopped = "interrupted"
    end = {"code": code, "stopped": stopped, "seconds": time.monotonic() - began, "time": time.time()}
    with (folder / RESERVED).open("r+b") as file:  # the disk may be full by now
        file.write(json.dumps(end).encode())
    (folder / RESERVED).rename(folder / "end.json")
    shutil.rmtree(workdir.parent, ignore_errors=True)
    for handle in locks:
        os.close(handle)


def open_in_memory(text: str) -> int:
    """Return an open file with a text, which child processes inherit. It has no name and is in memory, so nothing of it
    remains once the last process that has it ends, however that ends. Raises RefusedError."""
    for folder in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR")):  # noqa: S108 - the file has no name there
        with suppress(OSError), tempfile.TemporaryFile(dir=folder or "/nonexistent") as file:
            file.write(text.encode())
            file.seek(0)
            handle = os.dup(file.fileno())
            os.set_inheritable(handle, True)
            return handle
    raise RefusedError("no folder in memory takes secrets (/dev/shm, $XDG_RUNTIME_DIR)", "Mount one: /dev/shm")


def wait_or_stop(child: Child, folder: Path, until: float, stops: list[int]) -> tuple[int, str]:
    """Wait for the node's end, or stop it; return its exit code, and why it was stopped (empty: it was not)."""
    renewed = 0.0
    while (code := child.poll()) is None:
        stopped = "interrupted" if stops else ""
        stopped = "expired" if time.monotonic() > until else stopped
        stopped = "peer" if (folder / "stop").exists() else stopped
        stopped = "cancelled" if (folder / "cancel").exists() else stopped
        if stopped:
            return child.stop(contract.NOTICE_SECONDS), stopped
        if time.monotonic() >= renewed + SEEN_SECONDS:
            renewed = time.monotonic()
            os.utime(folder / "lock")
        time.sleep(POLL_SECONDS)
    child.kill()
    return code, ""


def outlived_client(root: Path, label: str) -> bool:
    """Remove what is left of a job's container, and return whether it ran on without its client: not the job has failed
    then, but Docker."""
    try:
        return container.remove_containers(root, label, grace=0)
    except RefusedError:  # so is the next start of the run
        return True


def lock_run(root: Path, run: str, run_folder: str) -> int:
    """Lock a run folder as `launch local` does, or a file that stands for one in a bucket.

    Raises RefusedError: another process has it.
    """
    if run_folder.startswith("gs://") or not run_folder:
        path = root / "runs-locked" / run
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    else:
        path = Path(run_folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedError(
                f"the run folder {path} can't be created: {error.strerror}", "Use another folder: --output DIR"
            ) from error
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RefusedError(f"run {run} is already running here", f"launch cancel {run}") from error
    return handle


def placed_command(job: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Return a job's command, its variables and its run folder, with the account's home folder for ~/."""
    run_folder = str(job["folder"])
    place = str(Path(run_folder).expanduser()) if run_folder.startswith("~/") else run_folder

    def placed(value: object) -> str:
        return str(value).replace(run_folder, place) if run_folder else str(value)

    return [placed(word) for word in job["argv"]], {name: placed(value) for name, value in job["env"].items()}, place


def container_label(job: Mapping[str, Any]) -> str:
    """Return the label of a job's container in Docker: that of its run's node, for this account."""
    return f"{os.getuid()}/{job['run']}/{job.get('rank', 0)}"


def node_command(
    root: Path, job: Mapping[str, Any], workdir: Path, argv: list[str], variables: Mapping[str, str], label: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a job's node, in the job's container if it has one, and its environment: some of the
    login's variables, the job's own `variables`, the job's Python first on PATH, launch_train of its launch, and its
    installed projects. `label`: the container's."""
    is_contained = container.is_in_container(job)
    kept = KEPT - container.LOGIN_ONLY if is_contained else KEPT
    env = {name: value for name, value in os.environ.items() if name in kept} | dict(variables)
    env["PATH"] = path_with_python(workdir.parent / "bin", str(job["python"]), env, is_here=not is_contained)
    trainer = str(root / "trainer" / str(job["trainer"]))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [trainer, env.get("PYTHONPATH")]))
    installed = workdir.parent / "project"
    if installed.is_dir():
        env[contract.PROJECT] = str(installed)
    if not is_contained:
        return argv, env
    gpus, has_input = int(job["gpus"]), contract.SECRETS_FILE in env
    return container.command_in_container(
        job["container"], argv, env, root, workdir, places=[str(job["folder"])], gpus=gpus, label=label, stdin=has_input
    )


def make_workdir(root: Path, job: Mapping[str, Any], name: str) -> Path:
    """Copy the job's code to a fresh folder `name` below the root's `work`, as a container has it; return that."""
    place = root / "work" / name
    shutil.rmtree(place, ignore_errors=True)
    try:
        if job["code"]:
            shutil.copytree(root / "code" / str(job["code"]), place, symlinks=True)
        workdir = place / "workspace"
        workdir.mkdir(parents=True, exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise RefusedError(f"the code can't be copied to {place}: {error}", "Free some space.") from error
    return workdir


def path_with_python(programs: Path, python: str, env: Mapping[str, str], *, is_here: bool) -> str:
    """Return a PATH on which `python` is the job's, by a script in the folder `programs`, which is the node's own: a
    program that another node is writing can't be executed. A link would not do: an environment is found by its
    python's place. `is_here`: it is this machine's, not a container's. Raises RefusedError: it does not exist."""
    if is_here and not os.access(python, os.X_OK):
        fix = "Repeat launch on HOST SPEC, which makes its environment again; or name another: --python PATH"
        raise RefusedError(f"the job's Python {python} does not exist", fix)
    programs.mkdir(exist_ok=True)
    for name in ("python", "python3"):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    own = env.get("PATH") or (os.environ.get("PATH") or os.defpath if is_here else "")
    return os.pathsep.join(filter(None, [str(programs), str(Path(python).parent), own]))


def describe_jobs(root: Path, ids: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the jobs with these ids, or all: what was started, `running`, and its `end` (null: none is recorded)."""
    folder = root / "jobs"
    names = sorted(path.name for path in folder.iterdir()) if ids is None and folder.is_dir() else ids or []
    jobs = []
    for name in names:
        with suppress(OSError, ValueError):  # it is being removed
            is_running = is_locked(folder / name / "lock")  # before the end: it is complete once nothing runs
            job = json.loads((folder / name / "job.json").read_bytes())
            end = None
            with suppress(FileNotFoundError):
                end = json.loads((folder / name / "end.json").read_bytes())
            if not is_running and end is None:
                with suppress(RefusedError):  # then the next start of the run is refused
                    container.remove_containers(root, container_label(job))
            is_cancelled = (folder / name / "cancel").exists()
            seen = (folder / name / "lock").stat().st_mtime
            jobs.append({**job, "running": is_running, "end": end, "cancelled": is_cancelled, "seen": seen})
    return jobs


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def mark_job(root: Path, name: str, mark: str) -> bool:
    """Begin to stop a job; return False if there is none. `mark`: `cancel`, or `stop` because its node on another host
    has failed."""
    folder = root / "jobs" / name
    if not (folder / "job.json").exists():
        return False
    (folder / mark).touch()
    if not is_locked(folder / "lock"):
        remove_left_container(root, name)
    return True


def remove_left_container(root: Path, name: str) -> None:
    """Remove the container of an ended job whose supervisor was killed. Raises RefusedError."""
    with suppress(OSError, ValueError):
        job = json.loads((root / "jobs" / name / "job.json").read_bytes())
        container.remove_containers(root, container_label(job))


def remove_job(root: Path, name: str) -> None:
    """Remove the record of an ended job, with what it left."""
    if not is_locked(root / "jobs" / name / "lock"):
        remove_left_container(root, name)
        with suppress(OSError, ValueError):  # another job of the run remains, or its folder is in a bucket
            Path(json.loads((root / "jobs" / name / "job.json").read_bytes())["folder"]).expanduser().rmdir()
        shutil.rmtree(root / "jobs" / name, ignore_errors=True)
        for workdir in (root / "work").glob(f"{name}*"):
            shutil.rmtree(workdir, ignore_errors=True)

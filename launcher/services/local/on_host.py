"""Run a rendered Vertex AI request on this machine, in processes.

The only inputs are the request's JSON, the files of the user's code and the cloud's endpoints. A setting of the spec
that is not in the request has no effect, exactly as on Vertex AI. Code, command, environment and topology are as in the
cloud; the image is not: `python` is one of this machine, by default that which runs launch.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from launch_train.common import contract
from launch_train.common.scratch import temporary_folder
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import write_installed
from launcher.services.local.processes import run
from launcher.services.local.replicas import ImageDefaults, Replica, gpu_shares, replica_names, replicas
from launcher.services.local.request import ParsedJob
from launcher.services.local.supervisor import Ended, OnLine, Preemption, Say
from launcher.services.local.workdirs import Code, WrittenFiles, working_directories

ENDPOINTS = (
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_",
    "CLOUDSDK_AUTH_",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_",
)
"""Prefixes of the variables with endpoints and credentials: the only ones passed on from launch's own environment."""


GPU = re.compile(r"\d+|(GPU|MIG)-.+")
"""A valid entry of CUDA_VISIBLE_DEVICES. CUDA ignores everything from the first invalid one on, so -1 means no GPUs
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables)."""


def rehearse(
    job: ParsedJob,
    *,
    code: Code,
    job_id: str,
    environ: Mapping[str, str],
    on_line: OnLine,
    on_left: Callable[[WrittenFiles], None],
    say: Say,
    python: str = sys.executable,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run the job's replicas here once, on free ports, and return how they ended. `python` runs the node and its ranks.

    `environ` is this process's environment, of which PATH, HOME, the endpoints and the folder of the code's projects
    are passed on. `on_left` is called after the replicas' end (also after Ctrl-C) if they wrote files into their
    working directories.

    Raises LaunchError: the command can't be started, this machine has no ports for so many replicas, or the code can't
    be copied.
    """
    addresses = local_addresses(job)
    with temporary_folder("replicas") as name:
        scratch = Path(name)
        project = {contract.PROJECT: environ[contract.PROJECT]} if contract.PROJECT in environ else {}
        if write_installed(code.installed, scratch / "project"):
            project = {contract.PROJECT: str(scratch / "project")}
        defaults = ImageDefaults(env={**image_env(make_folder(scratch / "site")), **project})
        programs = make_folder(scratch / "bin")
        for program in ("python", "python3"):  # a link would not do: an environment is found by its python's place
            (programs / program).write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
            (programs / program).chmod(0o755)
        planned = replicas(job, addresses=addresses, job_id=job_id, image_defaults=lambda _: defaults)
        with working_directories(code, scratch, on_left) as make_workdir:
            return run(
                with_threads(with_gpus(planned, visible_gpus(environ)), os.cpu_count() or 1),
                env=host_env(environ, programs, Path(python).parent),
                workdir=make_workdir,
                on_line=on_line,
                say=say,
                disable_retries=job.disable_retries,
                preemption=preemption,
                clock=clock,
            )


def check_program(job: ParsedJob, code: Code, environ: Mapping[str, str], python: str) -> None:
    """Check that the program of a job's run.command can be started here. Raises UsageError."""
    defaults, addresses = ImageDefaults(env={}), [""] * len(replica_names(job.pools))
    first = replicas(job, addresses=addresses, job_id="", image_defaults=lambda _: defaults)[0]
    cut = first.argv.index("--") if "--" in first.argv else 0
    if "--command" not in first.argv[:cut] or contract.RUN_PATH in (name := first.argv[cut + 1]):
        return
    if "/" in name and not Path(name).is_absolute():
        inside = {file.name: file.path for file in code.files}
        relative = posixpath.normpath(name)
        path = code.in_place / relative if code.in_place else inside.get(relative)
        if path is None or not path.is_file():
            raise UsageError(f"run.command: {name} is not in the code", "The path is relative to image.code.")
        if not os.access(path, os.X_OK):
            raise UsageError(f"run.command: {name} is not executable", f"chmod +x {path}")
        return
    folders = [Path(environ[contract.PROJECT], "bin")] if contract.PROJECT in environ else []
    path_here = first.env.get("PATH") or host_env(environ, *folders, Path(python).parent)["PATH"]
    if name in ("python", "python3") or f"bin/{name}" in code.installed or shutil.which(name, path=path_here):
        return
    where = "is not on the PATH of env" if "PATH" in first.env else f"is neither in {Path(python).parent} nor on PATH"
    raise UsageError(
        f"run.command: command not found: {name}; it {where}",
        "Install it, or name the environment that has it: --python DIR/bin/python",
    )


def image_env(site: Path) -> dict[str, str]:
    """Return the image's own environment: launch_train is importable, and no script folder comes before it.

    A folder that holds nothing but `launch_train` stands in for the image's: an installed package lies beside others
    that would otherwise hide the user's. The user's code is the working directory.
    """
    (site / "launch_train").symlink_to(Path(contract.__file__).resolve().parents[1], target_is_directory=True)
    return {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def host_env(environ: Mapping[str, str], *programs: Path) -> dict[str, str]:
    """Return what replicas get of this process's environment: PATH (the folders `programs` first), HOME, endpoints."""
    path = os.pathsep.join([*map(str, programs), environ.get("PATH", os.defpath)])
    return {"PATH": path, "HOME": environ.get("HOME", "/"), **endpoints(environ)}


def run_setup(
    lines: Sequence[str], folder: Path, environ: Mapping[str, str], say: Callable[[str], None], python: str
) -> None:
    """Run the lines of image.setup in a folder on this machine, as this user, with the programs of the Python that runs
    the job first.

    Raises LaunchError: a line failed.
    """
    for line in lines:
        say(f"image.setup: {line}")
        env = {**environ, "PATH": host_env(environ, Path(python).parent)["PATH"]}
        # Standard output is for the run's result.
        code = subprocess.run(["/bin/sh", "-c", line], cwd=folder, env=env, stdout=2, check=False).returncode
        if code:
            raise LaunchError(
                f"image.setup: {line!r} failed on this machine (exit code {code})",
                "See its output above. To run without the setup, remove --setup; to run it in the image: --docker",
            )


def endpoints(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with endpoints and credentials."""
    return {name: value for name, value in environ.items() if name.startswith(ENDPOINTS)}


def with_threads(all_replicas: Sequence[Replica], count: int) -> tuple[Replica, ...]:
    """Return the replicas; several of one process each share this machine's `count` processors.

    Each would use them all, and their threads would wait for each other: ten times slower with two replicas on two
    processors. Of several processes, torchrun gives each one thread.
    """
    share = {"OMP_NUM_THREADS": str(max(1, count // len(all_replicas)))}
    is_shared = len(all_replicas) > 1
    return tuple(
        replace(replica, env={**share, **replica.env})
        if is_shared and replica.env.get(contract.PROCESSES) in (None, "1")
        else replica
        for replica in all_replicas
    )


def with_gpus(all_replicas: Sequence[Replica], visible: Sequence[str]) -> tuple[Replica, ...]:
    """Return the replicas, each with its share of this machine's GPUs; all without GPUs if there are too few.

    CUDA orders GPUs by speed by default, nvidia-smi by bus id; CUDA_DEVICE_ORDER makes CUDA do the same.
    """
    return tuple(
        replace(
            replica, env={**replica.env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(share)}
        )
        for replica, share in zip(all_replicas, gpu_shares(all_replicas, visible), strict=True)
    )


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs that may be used: those in CUDA_VISIBLE_DEVICES if it is set, else all."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        entries = (part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(","))
        return tuple(takewhile(GPU.fullmatch, entries))
    if not shutil.which("nvidia-smi"):
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:  # the driver hangs, so its GPUs are unusable
        return ()
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()


def local_addresses(job: ParsedJob) -> list[str]:
    """Return a loopback address for each replica. Raises LaunchError."""
    return [f"127.0.0.1:{port}" for port in free_ports(len(replica_names(job.pools)))]


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports of the loopback interface. Raises LaunchError."""
    with ExitStack() as stack:
        try:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for listener in sockets:
                listener.bind(("127.0.0.1", 0))
        except OSError as error:
            problem = f"no free ports for {count} replicas: {error.strerror}"
            raise LaunchError(problem, "Run fewer replicas: --nodes 1") from error
        return [int(listener.getsockname()[1]) for listener in sockets]


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder

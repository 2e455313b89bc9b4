"""Run a rendered Vertex AI request on this machine, in processes.

The only inputs are the request's JSON, the files of the user's code and the cloud's endpoints. A setting of the spec
that is not in the request has no effect, exactly as on Vertex AI. Code, command, environment and topology are as in the
cloud; the image is not: `python` is the one that runs launch.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from launch_train.common import contract
from launcher.backend.request import with_current_package
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.rehearsal.processes import run
from launcher.rehearsal.replicas import ImageDefaults, Replica, gpu_shares, replica_names, replicas
from launcher.rehearsal.request import ParsedJob
from launcher.rehearsal.supervisor import Ended, OnLine, Preemption
from launcher.rehearsal.workdirs import Code, WrittenFiles, working_directories

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
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run the job's replicas here once, on free ports, and return how they ended.

    `environ` is this process's environment, of which PATH, HOME and the endpoints are passed on. `on_left` is called
    after the replicas' end (also after Ctrl-C) if they wrote files into their working directories.

    Raises:
        LaunchError: the command can't be started, this machine has no ports for so many replicas, or the code can't be
            copied.
    """
    addresses = local_addresses(job)
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        defaults = ImageDefaults(env=image_env(make_folder(scratch / "site")))
        present = with_present_names(job)
        planned = replicas(present, addresses=addresses, job_id=job_id, image_defaults=lambda _: defaults)
        with working_directories(code, [one.name for one in planned], scratch, on_left) as folders:
            return run(
                with_threads(with_gpus(planned, visible_gpus(environ)), os.cpu_count() or 1),
                env=host_env(environ),
                folders=folders,
                on_line=on_line,
                preemption=preemption,
                clock=clock,
            )


def with_present_names(job: ParsedJob) -> ParsedJob:
    """Return the job with the present name of launch_train in its commands; requests of older launches say `train`."""
    pools = []
    for pool in job.pools:
        container, command = pool.container_spec, len(pool.container_spec.command)
        words = tuple(with_current_package((*container.command, *container.args)))
        pools.append(replace(pool, container_spec=replace(container, command=words[:command], args=words[command:])))
    return replace(job, pools=tuple(pools))


def image_env(site: Path) -> dict[str, str]:
    """Return the image's own environment: launch_train is importable, and no script folder comes before it.

    A folder that holds nothing but `launch_train` stands in for the image's: an installed package lies beside others
    that would otherwise hide the user's. The user's code is the working directory.
    """
    (site / "launch_train").symlink_to(Path(contract.__file__).resolve().parents[1], target_is_directory=True)
    return {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def host_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what replicas get of this process's environment: PATH (this Python's programs first), HOME, endpoints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return {"PATH": path, "HOME": environ.get("HOME", "/"), **endpoints(environ)}


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
        replace(one, env={**share, **one.env}) if is_shared and one.env.get(contract.PROCESSES) in (None, "1") else one
        for one in all_replicas
    )


def with_gpus(all_replicas: Sequence[Replica], visible: Sequence[str]) -> tuple[Replica, ...]:
    """Return the replicas, each with its share of this machine's GPUs; all without GPUs if there are too few.

    CUDA orders GPUs by speed by default, nvidia-smi by bus id; CUDA_DEVICE_ORDER makes CUDA do the same.
    """
    return tuple(
        replace(one, env={**one.env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(share)})
        for one, share in zip(all_replicas, gpu_shares(all_replicas, visible), strict=True)
    )


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs that may be used: those in CUDA_VISIBLE_DEVICES if it is set, else all."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        entries = (one.strip() for one in environ["CUDA_VISIBLE_DEVICES"].split(","))
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
            for one in sockets:
                one.bind(("127.0.0.1", 0))
        except OSError as error:
            problem = f"no free ports for {count} replicas: {error.strerror}"
            raise LaunchError(problem, "Run fewer replicas: --nodes 1") from error
        return [int(one.getsockname()[1]) for one in sockets]


def make_folder(folder: Path) -> Path:
    """Create a folder and return it."""
    folder.mkdir(parents=True)
    return folder

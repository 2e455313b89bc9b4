"""Rehearse a rendered Vertex request on this machine.

The runner is given the request's JSON, the files of the user's code and the endpoints of the cloud, and nothing
else: what a spec says that isn't in the request has no effect, exactly as on Vertex AI. Without an image, only
code, command, environment and topology are rehearsed: `python` is the one that runs launch.
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
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.rehearsal.processes import run
from launcher.rehearsal.replicas import Own, Replica, named, replicas, shares
from launcher.rehearsal.request import Job
from launcher.rehearsal.supervisor import Ended, OnLine, Preemption
from launcher.rehearsal.workdirs import Code, Left, working_directories

ENDPOINTS = (
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_",
    "CLOUDSDK_AUTH_",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_",
)
"""Names (beginnings) of the variables that say where the cloud is and who asks; they alone come from outside."""


GPU = re.compile(r"\d+|(GPU|MIG)-.+")
"""An entry of CUDA_VISIBLE_DEVICES that names one. CUDA stops at any other: -1 alone means none at all
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables)."""


def rehearse(
    job: Job,
    *,
    code: Code,
    job_id: str,
    environ: Mapping[str, str],
    on_line: OnLine,
    on_left: Callable[[Left], None],
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Start the job's replicas here once, on ports of their own, and say how they ended.

    `environ` is this process's environment, of which PATH, HOME and the endpoints are passed on. `on_left` is called
    once they have ended, also by Ctrl-C, if they wrote files into their working directories.

    Raises:
        LaunchError: its command can't be started, there are more replicas than this machine has room for, or the code
            can't be copied.
    """
    addresses = here(job)
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        own = Own(env=image_env(made(scratch / "site")))
        started = replicas(job, addresses=addresses, job_id=job_id, own=lambda _: own)
        with working_directories(code, [one.name for one in started], scratch, on_left) as folders:
            return run(
                with_gpus(started, visible_gpus(environ)),
                env=outside(environ),
                folders=folders,
                on_line=on_line,
                preemption=preemption,
                clock=clock,
            )


def image_env(site: Path) -> dict[str, str]:
    """Return the image's own environment: launch_train is importable, and no script folder comes before it.

    A folder that holds nothing but `launch_train` stands in for the image's: an installed package lies beside others
    that would otherwise hide the user's. The user's code is the working directory.
    """
    (site / "launch_train").symlink_to(Path(contract.__file__).resolve().parents[1], target_is_directory=True)
    return {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """PATH (this Python's programs first), HOME and the endpoints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return {"PATH": path, "HOME": environ.get("HOME", "/"), **endpoints(environ)}


def endpoints(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say where the cloud is and who asks."""
    return {name: value for name, value in environ.items() if name.startswith(ENDPOINTS)}


def with_gpus(all_replicas: Sequence[Replica], visible: Sequence[str]) -> tuple[Replica, ...]:
    """Each replica with its own share of this machine's GPUs, or all on CPUs when there aren't enough.

    CUDA counts GPUs by their speed unless told otherwise, nvidia-smi by their place on the bus.
    """
    return tuple(
        replace(one, env={**one.env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(share)})
        for one, share in zip(all_replicas, shares(all_replicas, visible), strict=True)
    )


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The NVIDIA GPUs that may be used here: the user's own CUDA_VISIBLE_DEVICES, else all of this machine."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        named = (one.strip() for one in environ["CUDA_VISIBLE_DEVICES"].split(","))
        return tuple(takewhile(GPU.fullmatch, named))
    if not shutil.which("nvidia-smi"):
        return ()
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:  # a driver that hangs is no driver to train with
        return ()
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()


def here(job: Job) -> list[str]:
    """An address of this machine for each replica. Raises LaunchError."""
    return [f"127.0.0.1:{port}" for port in free_ports(len(named(job.pools)))]


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback interface, different from each other. Raises LaunchError."""
    with ExitStack() as stack:
        try:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
        except OSError as error:
            raise LaunchError(f"no free ports for {count} replicas: {error.strerror}", "Rehearse fewer.") from error
        return [int(one.getsockname()[1]) for one in sockets]


def made(folder: Path) -> Path:
    """The folder, after making it."""
    folder.mkdir(parents=True)
    return folder

"""The GPUs of this machine, who uses them, its free disk and its network."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

QUERY_SECONDS: Final = 30.0
TRIES, PROBE_SECONDS = 4, 0.05
"""A process that describes the machine holds each lock for an instant, so a lock is tried again."""
BUSY_MB: Final = 300
"""GPU memory in use, in MiB, from which a GPU without a listed process counts as in use: in a container, nvidia-smi
shows no processes."""
SIOCGIFADDR: Final = 0x8915
"""The ioctl that returns an interface's IPv4 address (netdevice(7))."""


def describe_machine(root: Path) -> dict[str, Any]:
    """Return the machine as data: `host`, `processor` (x86_64, …), `gpus` (`list_gpus`), `gpu_problem`, and `free_gb`
    of the disk of `root`."""
    devices, problem = list_gpus()
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free / 1e9
    names = {"host": socket.gethostname(), "processor": os.uname().machine}
    return {**names, "gpus": devices, "gpu_problem": problem, "free_gb": free}


def list_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return the NVIDIA GPUs with who uses them, and why there are none.

    Each has `index`, `uuid`, `name`, `memory_mb` (MiB), `used_mb`, `driver`, `capability` (9.0; 0: unknown), `users`
    (names of accounts with a process on it), `run` (the run of launch that has it) and `free`.
    """
    fields = "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version"
    try:
        try:
            rows = query(f"{fields},compute_cap")
        except ValueError:  # drivers before 510 don't know that field
            rows = [[*row, ""] for row in query(fields)]
        processes = query("--query-compute-apps=gpu_uuid,pid")
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [], f"nvidia-smi failed: {error}"
    devices = []
    for index, uuid, name, memory, used, driver, capability in rows:
        users = {account_of(int(pid)) for gpu, pid in processes if gpu == uuid and pid.isdecimal()}
        devices.append(
            {
                "index": figure(index),
                "uuid": uuid,
                "name": name,
                "memory_mb": figure(memory),
                "used_mb": figure(used),
                "driver": driver,
                "capability": float(capability) if capability.replace(".", "").isdecimal() else 0.0,
                "users": sorted(users),
                "run": (run := run_of_gpu(uuid)),
                "free": not users and not run and figure(used) < BUSY_MB,
            }
        )
    return devices, "" if devices else "nvidia-smi lists no GPU"


def query(what: str) -> list[list[str]]:
    """Return the rows of an nvidia-smi query. Raises OSError, SubprocessError, ValueError."""
    words = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    if ran.returncode:
        raise ValueError((ran.stdout + ran.stderr).strip().splitlines()[0] if ran.stdout + ran.stderr else "no output")
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines()]
    return [row for row in rows if len(row) == what.count(",") + 1]  # others are warnings


def account_of(pid: int) -> str:
    """Return the account of a process; its number if it is unknown."""
    import pwd

    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
        return pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return str(pid)


def gpu_lock_path(uuid: str) -> Path:
    """Return the file that a run of any account locks while it has a GPU; it holds the run's ID."""
    return Path(tempfile.gettempdir(), f"launch-{uuid}.lock")


def run_of_gpu(uuid: str) -> str:
    """Return the run that has locked a GPU; empty: none has."""
    try:
        with gpu_lock_path(uuid).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read().decode(errors="replace").strip() or "?"
    except OSError:
        pass
    return ""


def take_gpus(count: int, run: str) -> tuple[list[str], list[int], str]:
    """Lock `count` free GPUs for a run while this process lives.

    Returns their indices, the locked files, and why there are too few; then nothing is locked.
    """
    devices, problem = list_gpus()
    if not devices:
        return [], [], f"no GPU: {problem}"
    taken: dict[str, int] = {}
    for gpu in devices:
        if len(taken) == count:
            break
        if gpu["free"] and (handle := lock_file(gpu_lock_path(gpu["uuid"]), run)) is not None:
            taken[str(gpu["index"])] = handle
    if len(taken) == count:
        return [*taken], [*taken.values()], ""
    for handle in taken.values():
        os.close(handle)
    return [], [], f"{len(taken)} of {len(devices)} GPUs are free; the job needs {count}"


def list_interfaces() -> Iterator[tuple[str, str]]:
    """Yield the name and the IPv4 address of each network interface of this machine that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])


def lock_file(path: Path, text: str) -> int | None:
    """Lock a file exclusively, write `text` into it and return its handle; None: another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDWR)  # without O_CREAT, which Linux refuses for another account's file in /tmp
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        os.fchmod(handle, 0o666)
    for _ in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(PROBE_SECONDS)
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, text.encode(), 0)
            return handle
    os.close(handle)
    return None


def figure(text: str) -> int:
    """Return a figure of nvidia-smi; 0 for [N/A]."""
    try:
        return int(float(text))
    except ValueError:
        return 0

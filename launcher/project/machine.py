"""Check this machine: nvidia-smi, files, and a child process that imports torch; then pure functions of what was read.

Each read has a time limit and fails alone; torch is never imported in this process.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from launcher import catalog
from launcher.errors import LaunchError
from launcher.gcp.parallel import together
from launcher.plan.recipe import INDEX
from launcher.project.model import Check, Found, Status, answer
from launcher.text import listed, size_text

SECONDS: Final = 90.0
"""Time limit of all reads together: a first import of torch from a slow disk takes a minute."""
COMMAND_SECONDS: Final = 15.0
GPU_FIELDS: Final = (
    *("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap", "compute_mode"),
    "ecc.errors.uncorrected.volatile.total",
)
TORCH: Final = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "archs": torch.cuda.get_arch_list()}
found["available"] = torch.cuda.is_available()
found["gpus"] = torch.cuda.device_count() if found["available"] else 0
found["cudnn"] = torch.backends.cudnn.version() if torch.version.cuda else None
try:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
except Exception as error:
    found["nccl"] = None
print(json.dumps(found))
"""
NVIDIA: Final = "0x10de"
"""NVIDIA's vendor number on the PCI bus."""


def read_machine(environ: Mapping[str, str], root: Path = Path("/"), seconds: float = SECONDS) -> dict[str, Any]:
    """Return each answer by its name; None: not installed; LaunchError: it could not be read. `root`: folder in whose
    place `/` is read."""
    return together(
        {
            "python": lambda: {"version": ".".join(map(str, sys.version_info[:3])), "path": sys.executable},
            "torch": partial(torch_report, environ),
            "gpus": partial(gpu_rows, environ),
            "pci": partial(pci_gpus, root),
            "xids": partial(xids, environ),
            "cuda": partial(cuda_installations, environ, root),
            "memory": partial(file_system_space, str(root / "dev/shm")),
            "disk": partial(file_system_space, "."),
            "tools": lambda: {
                "gcloud": shutil.which("gcloud", path=environ.get("PATH")) is not None,
                "google": installed("google.cloud.aiplatform_v1"),
            },
        },
        seconds,
    )


def torch_report(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a child process says about torch; None: not installed. Raises LaunchError: its import fails."""
    if find_spec("torch") is None:
        return None
    done = output(environ, sys.executable, "-P", "-c", TORCH, seconds=SECONDS - 5)
    try:
        report: dict[str, Any] = json.loads(done.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise LaunchError("import torch printed something unexpected") from error
    return report


def gpu_rows(environ: Mapping[str, str]) -> list[dict[str, str]] | None:
    """Return nvidia-smi's row of each GPU; None: not installed. Raises LaunchError: it fails."""
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return None
    text = output(environ, "nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def pci_gpus(root: Path) -> int:
    """Return the number of NVIDIA display controllers (PCI class 0x03) on the bus, with or without a driver."""
    devices = [*(root / "sys/bus/pci/devices").glob("*")]
    return sum(
        file_text(device / "vendor") == NVIDIA and file_text(device / "class").startswith("0x03") for device in devices
    )


def xids(environ: Mapping[str, str]) -> list[str]:
    """Return the kernel log's lines with an Xid of the NVIDIA driver. Raises LaunchError: the log is not readable."""
    lines = re.findall(r"NVRM: (Xid \([^)]*\): [^\n]*)", output(environ, "dmesg"))
    return [str(line) for line in lines]


def cuda_installations(environ: Mapping[str, str], root: Path) -> dict[str, Any]:
    """Return the CUDA installations, nvcc's version, and the folders of LD_LIBRARY_PATH that hold CUDA libraries."""
    folders = {folder.resolve() for folder in (root / "usr/local").glob("cuda*") if folder.is_dir()}
    shadows = [
        folder
        for folder in environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder and any([*Path(folder).glob("lib" + name)] for name in ("cudart.so*", "cudnn.so*", "nccl.so*"))
    ]
    has_nvcc = shutil.which("nvcc", path=environ.get("PATH")) is not None
    version = re.search(r"release ([\d.]+)", output(environ, "nvcc", "--version")) if has_nvcc else None
    return {
        "installations": sorted(str(folder) for folder in folders),
        "nvcc": version[1] if version else "",
        "shadows": shadows,
    }


def file_system_space(path: str) -> dict[str, Any]:
    """Return size and free bytes of a file system. Raises LaunchError."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from error
    return {"path": path, "total": usage.total, "free": usage.free}


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it (only its parent packages)."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def output(environ: Mapping[str, str], *command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return a command's stdout. Raises LaunchError: it fails, is missing, or takes too long."""
    env = {**os.environ, **environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=env)
    except OSError as error:
        raise LaunchError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{Path(command[0]).name} did not end within {seconds:.0f} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise LaunchError(f"{Path(command[0]).name} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def file_text(file: Path) -> str:
    """Return a small file's text; empty if it can't be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- Checks -----------------------------------------------------------------------------------------------------------

GB: Final = 1e9
ADAMW_BYTES: Final = 16
"""Bytes of fp32 training with AdamW per parameter: weights, gradients and two moments, 4 bytes each."""
LEAST_SHM: Final = 1 << 30
"""Bytes of /dev/shm below which data loader processes fail. Docker's default is 64 MiB."""
LOW_DISK, NO_DISK = 20 * GB, 1 * GB
INSTALL_GCP: Final = 'pip install "gcp-launch[gcp]"'
INSTALL_TORCH: Final = 'pip install "gcp-launch[train]"'
WARNING_XIDS: Final = frozenset({13, 31, 43, 45})
"""Xids that a faulty program causes; all others point to the machine (NVIDIA, "XID errors")."""


def check_machine(found: Found) -> tuple[Check, ...]:
    """Return the result of every check, in the order of the page."""
    python = answer(found, "python") or {}
    return (
        Check("python", "ok", f"{python.get('version', '')} ({python.get('path', '')})"),
        *check_driver(found),
        *check_gpus(found),
        *check_xids(found),
        *check_torch(found),
        *check_cuda(found),
        *check_space(found),
        *check_tools(found),
    )


def problem(found: Found, name: str) -> str:
    """Return why a read failed; empty if it did not."""
    result = found.get(name)
    return result.problem if isinstance(result, LaunchError) else ""


def check_driver(found: Found) -> Iterator[Check]:
    """Check that the driver works if the machine has NVIDIA GPUs."""
    cards, rows = answer(found, "pci") or 0, answer(found, "gpus")
    if error := problem(found, "gpus"):
        yield Check("driver", "failed", error, "sudo reboot" if "mismatch" in error.lower() else "sudo nvidia-smi -q")
    elif rows:
        yield Check("driver", "ok", f"NVIDIA {rows[0]['driver_version']}")
    elif cards:
        text = f"the machine has {cards} NVIDIA GPU{'s' * (cards > 1)}, but no working driver"
        yield Check("driver", "failed", text, "sudo apt-get install nvidia-driver-580-server")
    else:
        yield Check("driver", "ok", "no NVIDIA GPU: launch local runs on the CPU")


def check_gpus(found: Found) -> Iterator[Check]:
    """Check each GPU: memory, ECC errors and compute mode."""
    for row in answer(found, "gpus") or ():
        name, index = f"gpu {row['index']}", row["index"]
        total, used = megabytes(row["memory.total"]), megabytes(row["memory.used"])
        errors, mode = row["ecc.errors.uncorrected.volatile.total"], row["compute_mode"]
        if errors.isdigit() and int(errors):
            text = f"{row['name']}: {errors} uncorrectable ECC errors since the last reset"
            yield Check(name, "failed", text, f"sudo nvidia-smi --gpu-reset --id={index}")
        elif mode.startswith(("Exclusive", "Prohibited")):
            text = f"{row['name']}: compute mode {mode}, so a second process fails"
            yield Check(name, "warning", text, f"sudo nvidia-smi --compute-mode=0 --id={index}")
        elif total and used > total // 10:
            text = f"{row['name']}: {used / 1024:.1f} of {total / 1024:.0f} GiB in use by other processes"
            yield Check(name, "warning", text, "nvidia-smi --query-compute-apps=pid,name --format=csv")
        else:
            most = total * (1 << 20) / ADAMW_BYTES / GB
            holds = f", at most {most:.1f}B parameters with AdamW in fp32" if total else ""
            yield Check(name, "ok", f"{row['name']}, {total / 1024:.0f} GiB{holds}")


def megabytes(text: str) -> int:
    """Return nvidia-smi's MiB; 0 for [N/A]."""
    return int(text) if text.isdigit() else 0


def check_xids(found: Found) -> Iterator[Check]:
    """Check the kernel log for Xid errors."""
    if not answer(found, "gpus"):
        return
    if error := problem(found, "xids"):
        yield Check("xid", "unknown", f"the kernel log is not readable: {error}", "sudo dmesg")
        return
    lines = answer(found, "xids") or ()
    numbers = {int(match[1]) for line in lines if (match := re.search(r"\): (\d+)", line))}
    if not lines:
        yield Check("xid", "ok", "no Xid errors in the kernel log")
        return
    serious = numbers - WARNING_XIDS
    text = f"Xid {', '.join(map(str, sorted(numbers)))} in the kernel log: {lines[-1]}"
    yield Check("xid", "failed" if serious else "warning", text, "sudo dmesg | grep NVRM")


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def check_torch(found: Found) -> Iterator[Check]:
    """Check that torch works, that it has kernels for the GPUs, and that the driver supports its CUDA."""
    known, rows = answer(found, "torch"), answer(found, "gpus") or []
    if error := problem(found, "torch"):
        yield Check("torch", "failed", f"import torch fails: {error}", f"{INSTALL_TORCH} --force-reinstall")
        return
    if known is None:
        yield Check("torch", "warning", "not installed: needed to train here", INSTALL_TORCH)
        return
    cuda = known.get("cuda")
    text = f"{known['version']}, CUDA {cuda or 'none'}"
    if rows and (wrong := mismatch(known, rows)):
        yield Check("torch", "failed", f"{text}: {wrong}", install(rows))
        return
    if rows and not known.get("available"):
        text += ": torch sees no GPU (CUDA_VISIBLE_DEVICES?)"
        yield Check("torch", "failed", text, "unset CUDA_VISIBLE_DEVICES\nnvidia-smi")
        return
    seen = f", {known['gpus']} of {len(rows)} GPUs visible" if rows else ""
    yield Check("torch", "ok", text + seen)
    if cuda:
        libraries = f"NCCL {known.get('nccl') or 'unknown'}, cuDNN {known.get('cudnn') or 'unknown'}"
        yield Check("libraries", "ok", f"{libraries} (torch's own)")


def mismatch(known: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> str:
    """Return why torch can't use the GPUs with this driver; empty if it can, as far as the tables say."""
    if not known.get("cuda"):
        return "a build without CUDA"
    driver, needed = major(rows[0]["driver_version"]), min_driver(known["cuda"])
    if needed and driver and driver < needed:
        return f"needs driver {needed} or newer, this one is {rows[0]['driver_version']}"
    for row in rows:
        if not has_kernels(known.get("archs") or (), row["compute_cap"]):
            return f"has no kernels for {row['name']} (compute capability {row['compute_cap']})"
    return ""


def has_kernels(archs: Sequence[str], capability: str) -> bool:
    """Return whether a build runs on a compute capability: binaries (sm_80) run on the same major version from their
    minor one on, PTX (compute_80) on every later one. True if either is unknown."""
    wanted = version(capability)
    pairs = [(name.partition("_")[0], version_of_arch(name)) for name in archs]
    known = [(kind, arch) for kind, arch in pairs if arch]
    if not wanted or not known:
        return True
    return any(
        arch <= wanted if kind == "compute" else arch[0] == wanted[0] and arch[1] <= wanted[1] for kind, arch in known
    )


def version_of_arch(arch: str) -> tuple[int, int] | None:
    """Return (9, 0) of sm_90 or sm_90a, (12, 0) of sm_120."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]?", arch)
    return (int(match[1]), int(match[2])) if match else None


def version(text: str) -> tuple[int, int] | None:
    """Return (8, 9) of 8.9."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def major(text: str) -> int:
    """Return 580 of 580.65.06; 0 if unknown."""
    first = text.partition(".")[0]
    return int(first) if first.isdigit() else 0


def min_driver(cuda: str) -> int:
    """Return the oldest driver of a CUDA version by the catalog: that of its build, else of its major version."""
    known = {name: int(driver) for name, driver in catalog.load().wheels.items() if driver}
    exact = known.get("cu" + "".join(cuda.split(".")[:2]))
    same = [driver for name, driver in known.items() if name[2:-1] == cuda.partition(".")[0]]
    return exact or min(same, default=0)


def install(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the command that installs a torch for the GPUs: the oldest build with kernels for them, or its driver."""
    capability, driver = version(rows[0]["compute_cap"]) or (0, 0), major(rows[0]["driver_version"])
    build = "cu130" if capability >= (10, 0) else "cu126"
    needed = int(catalog.load().wheels[build] or 0)
    if driver and driver < needed:
        return f"sudo apt-get install nvidia-driver-{needed}-server"
    return f"pip install --force-reinstall torch --index-url {INDEX}/{build}"


def check_cuda(found: Found) -> Iterator[Check]:
    """Check for CUDA installations that are used in place of torch's own libraries."""
    known, torch = answer(found, "cuda") or {}, answer(found, "torch") or {}
    folders, nvcc, shadows = known.get("installations", ()), known.get("nvcc", ""), known.get("shadows", ())
    if shadows and torch.get("cuda"):
        text = f"LD_LIBRARY_PATH has CUDA libraries that replace torch's own: {listed(shadows, 2)}"
        yield Check("cuda", "warning", text, "unset LD_LIBRARY_PATH")
    elif nvcc and torch.get("cuda") and nvcc.partition(".")[0] != torch["cuda"].partition(".")[0]:
        text = f"nvcc is CUDA {nvcc}, torch is CUDA {torch['cuda']}: extensions that are compiled here fail to load"
        version = torch["cuda"]
        yield Check("cuda", "warning", text, f"export CUDA_HOME=/usr/local/cuda-{version}")
    elif len(folders) > 1:
        yield Check("cuda", "ok", f"{len(folders)} installations ({listed(folders, 3)}); torch uses its own")
    elif folders:
        yield Check("cuda", "ok", f"{folders[0]}{f', nvcc {nvcc}' if nvcc else ''}")


# --- Space and tools --------------------------------------------------------------------------------------------------


def check_space(found: Found) -> Iterator[Check]:
    """Check shared memory and disk."""
    memory, disk = answer(found, "memory"), answer(found, "disk")
    status: Status
    if memory:
        status, fix, text = "ok", "", f"{size_text(memory['total'])} of shared memory"
        if memory["total"] < LEAST_SHM:
            status, fix = "warning", "sudo mount -o remount,size=16G /dev/shm"
            text += "; in a container: docker run --shm-size=16g"
        yield Check("shm", status, text, fix)
    if disk:
        free = disk["free"]
        status = "failed" if free < NO_DISK else "warning" if free < LOW_DISK else "ok"
        fix = "" if status == "ok" else "du -xh --max-depth=1 . | sort -h | tail"
        yield Check("disk", status, f"{size_text(free)} free here", fix)


def check_tools(found: Found) -> Iterator[Check]:
    known = answer(found, "tools") or {}
    if known.get("google"):
        yield Check("google", "ok", "Google's client libraries are installed")
    else:
        text = "Google's client libraries are not installed: launch can plan, but not submit"
        yield Check("google", "warning", text, INSTALL_GCP)
    if known.get("gcloud"):
        yield Check("gcloud", "ok", "installed")
    else:
        text = "not installed: needed to log in, and for SSH to VMs without an external IP"
        yield Check("gcloud", "warning", text, "https://cloud.google.com/sdk/docs/install")

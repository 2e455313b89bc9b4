"""The checks of this machine: each fault alone, and what is read with a fake nvidia-smi, files, and no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.project import machine
from launcher.project.machine import check_machine, has_kernels, min_driver
from launcher.project.report import lines

GPU = {
    "index": "0",
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "memory.used": "4",
    "driver_version": "580.65.06",
    "compute_cap": "9.0",
    "compute_mode": "Default",
    "ecc.errors.uncorrected.volatile.total": "0",
}
TORCH = {
    "version": "2.13.0+cu126",
    "cuda": "12.6",
    "archs": ["sm_80", "sm_90", "compute_90"],
    "available": True,
    "gpus": 1,
    "cudnn": 91002,
    "nccl": "2.27.3",
}
GOOD: dict[str, Any] = {
    "python": {"version": "3.11.7", "path": "/venv/bin/python"},
    "torch": TORCH,
    "gpus": [GPU],
    "pci": 1,
    "xids": [],
    "cuda": {"installations": ["/usr/local/cuda-12.6"], "nvcc": "12.6", "shadows": []},
    "memory": {"path": "/dev/shm", "total": 64 << 30, "free": 64 << 30},
    "disk": {"path": ".", "total": 1 << 40, "free": 1 << 39},
    "tools": {"gcloud": True, "docker": True, "google": True},
}


def bad(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(one.name, one.status, one.fix.partition("\n")[0]) for one in check_machine(found) if one.status != "ok"]


def test_a_good_machine() -> None:
    assert not bad(GOOD)
    assert max(map(len, lines(check_machine(GOOD)))) <= 80


FAULTS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "no driver": ({"gpus": None}, ("driver", "failed", "sudo apt-get install nvidia-driver-580-server")),
    "mismatch": (
        {"gpus": LaunchError("nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch")},
        ("driver", "failed", "sudo reboot"),
    ),
    "ecc": (
        {"gpus": [{**GPU, "ecc.errors.uncorrected.volatile.total": "3"}]},
        ("gpu 0", "failed", "sudo nvidia-smi --gpu-reset --id=0"),
    ),
    "exclusive": (
        {"gpus": [{**GPU, "compute_mode": "Exclusive_Process"}]},
        ("gpu 0", "warning", "sudo nvidia-smi --compute-mode=0 --id=0"),
    ),
    "in use": (
        {"gpus": [{**GPU, "memory.used": "40000"}]},
        ("gpu 0", "warning", "nvidia-smi --query-compute-apps=pid,name --format=csv"),
    ),
    "xid": (
        {"xids": ["Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."]},
        ("xid", "failed", "sudo dmesg | grep NVRM"),
    ),
    "xid of a program": (
        {"xids": ["Xid (PCI:0000:04:00): 31, MMU Fault"]},
        ("xid", "warning", "sudo dmesg | grep NVRM"),
    ),
    "no kernel log": ({"xids": LaunchError("dmesg failed")}, ("xid", "unknown", "sudo dmesg")),
    "no torch": ({"torch": None}, ("torch", "warning", 'pip install "gcp-launch[train]"')),
    "cpu build": (
        {"torch": {**TORCH, "cuda": None}},
        ("torch", "failed", "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
    ),
    "old driver": (
        {"gpus": [{**GPU, "driver_version": "550.90.07"}], "torch": {**TORCH, "cuda": "13.0"}, "cuda": {}},
        ("torch", "failed", "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"),
    ),
    "no kernels": (
        {"gpus": [{**GPU, "compute_cap": "12.0"}], "torch": {**TORCH, "archs": ["sm_80", "sm_90"]}},
        ("torch", "failed", "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"),
    ),
    "hidden": ({"torch": {**TORCH, "available": False}}, ("torch", "failed", "unset CUDA_VISIBLE_DEVICES")),
    "broken torch": (
        {"torch": LaunchError("python failed: ImportError: libcudnn.so.9")},
        ("torch", "failed", 'pip install "gcp-launch[train]" --force-reinstall'),
    ),
    "other nvcc": (
        {"cuda": {"installations": ["/a", "/b"], "nvcc": "11.8", "shadows": []}},
        ("cuda", "warning", "export CUDA_HOME=/usr/local/cuda-12.6"),
    ),
    "shadowed": (
        {"cuda": {"installations": [], "nvcc": "", "shadows": ["/usr/local/cuda/lib64"]}},
        ("cuda", "warning", "unset LD_LIBRARY_PATH"),
    ),
    "shm": ({"memory": {"total": 64 << 20, "free": 0}}, ("shm", "warning", "sudo mount -o remount,size=16G /dev/shm")),
    "low disk": ({"disk": {"free": 5e9}}, ("disk", "warning", "du -xh --max-depth=1 . | sort -h | tail")),
    "full disk": ({"disk": {"free": 5e8}}, ("disk", "failed", "du -xh --max-depth=1 . | sort -h | tail")),
    "base package": (
        {"tools": {"gcloud": True, "google": False}},
        ("google", "warning", 'pip install "gcp-launch[gcp]"'),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_alone(name: str) -> None:
    changes, expected = FAULTS[name]
    assert bad({**GOOD, **changes}) == [expected]


def test_all_reads_failing_is_a_page_too() -> None:
    found = {name: LaunchError("no answer within 90 s") for name in GOOD}
    assert {"driver", "torch"} <= {one.name for one in check_machine(found) if one.status == "failed"}


def test_no_gpu_needs_no_driver_and_no_cuda() -> None:
    here = {**GOOD, "gpus": None, "pci": 0, "torch": {**TORCH, "cuda": None, "available": False}}
    assert not bad(here)


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_80"], "8.9", True),
        (["sm_90"], "8.9", False),
        (["sm_80"], "9.0", False),
        (["sm_80", "compute_80"], "9.0", True),
        (["sm_90a"], "9.0", True),
        (["sm_120"], "12.0", True),
        ([], "9.0", True),
        (["sm_80"], "[N/A]", True),
    ],
)
def test_binaries_run_on_their_major_version_and_ptx_on_later_ones(
    archs: list[str], capability: str, runs: bool
) -> None:
    assert has_kernels(archs, capability) == runs


def test_the_oldest_driver_of_a_cuda_is_the_catalogs() -> None:
    assert (min_driver("12.6"), min_driver("13.0"), min_driver("12.3"), min_driver("99.0")) == (525, 580, 525, 0)


SMI = """#!/bin/sh
echo "0, NVIDIA L4, 23034, 1, 580.65.06, 8.9, Default, 0"
echo "1, NVIDIA L4, 23034, 1, 580.65.06, 8.9, Default, [N/A]"
"""


def put(folder: Path, name: str, text: str) -> dict[str, str]:
    """Add a command to a folder, and return an environment whose PATH has it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path) -> None:
    env = put(tmp_path / "bin", "nvidia-smi", SMI)
    found = machine.gpu_rows(env)
    assert found
    assert [one["compute_cap"] for one in found] == ["8.9", "8.9"]
    env = put(tmp_path / "bin", "nvidia-smi", "#!/bin/sh\necho Driver/library version mismatch\nexit 18\n")
    with pytest.raises(LaunchError, match="mismatch"):
        machine.gpu_rows(env)
    assert machine.gpu_rows({"PATH": "/nonexistent"}) is None


def test_cards_without_a_driver_are_seen_on_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        device = tmp_path / "sys/bus/pci/devices" / str(number)
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert machine.pci_gpus(tmp_path) == 1


def test_libraries_that_replace_torchs_are_found(tmp_path: Path) -> None:
    (tmp_path / "usr/local/cuda-12.6").mkdir(parents=True)
    (tmp_path / "usr/local/cuda").symlink_to(tmp_path / "usr/local/cuda-12.6")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudnn.so.8").touch()
    env = put(tmp_path / "bin", "nvcc", "#!/bin/sh\necho Cuda compilation tools, release 12.6, V12.6.85\n")
    found = machine.cuda_installations({**env, "LD_LIBRARY_PATH": f"{tmp_path / 'lib'}:/nonexistent:"}, tmp_path)
    assert (len(found["installations"]), found["nvcc"], found["shadows"]) == (1, "12.6", [str(tmp_path / "lib")])


def test_xids_are_read_from_the_kernel_log(tmp_path: Path) -> None:
    log = "[ 9.1] NVRM: Xid (PCI:0000:04:00): 79, pid=1, GPU has fallen off the bus."
    assert machine.xids(put(tmp_path, "dmesg", f"#!/bin/sh\necho '{log}'\n")) == [log.partition("NVRM: ")[2]]
    with pytest.raises(LaunchError, match="not permitted"):
        machine.xids(put(tmp_path, "dmesg", "#!/bin/sh\necho dmesg: Operation not permitted >&2\nexit 1\n"))


def test_a_command_that_never_ends_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"did not end within 0 s"):
        machine.output(dict(os.environ), sys.executable, "-c", "import time; time.sleep(60)", seconds=0.2)

"""What is wrong with GPUs."""

from __future__ import annotations

import pytest

from launch_train.monitoring.health import GpuFault, cuda_fault, faults, is_gpu
from launch_train.monitoring.nvidia_smi import Card, links, parse_smi_report
from tests.train.monitoring.nvidiasmi import MIG_DEVICE, PROCESS, T4, eight, gpu, log, matrix


def cards(text: str) -> tuple[Card, ...]:
    report = parse_smi_report(text)
    assert report is not None
    return report.cards


def test_nothing_is_wrong_with_a_machine_that_is_fine() -> None:
    assert faults(cards(eight()), links(matrix())) == []


@pytest.mark.parametrize(
    ("differences", "fatal", "words"),
    [
        ({"recovery": "Reset"}, True, "the driver requests a reset: use another machine"),
        ({"recovery": "Reboot"}, True, "the driver requests a reboot"),
        ({"reset": "Yes", "recovery": "N/A"}, True, "the driver requests a reset"),
        ({"recovery": "Drain and Reset"}, False, "the driver requests this action: Drain and Reset"),
        ({"failure": "Yes"}, True, "could not be replaced"),
        ({"pending": "Yes"}, False, "it needs a reset"),
        ({"dram": 3}, False, "3 uncorrectable memory errors since the driver was loaded"),
        ({"mode": "Prohibited"}, True, "nothing can run on it"),
        ({"mode": "Exclusive_Process"}, False, "Exclusive_Process"),
        ({"mig": "Enabled"}, True, "MIG is on, but has no instance"),
        ({"mig": "Enabled", "mig_devices": MIG_DEVICE, "used": 9000}, False, "MIG is on: a process gets one instance"),
        ({"used": 3052}, False, "3.2 of 85.5 GB are in use, by a process that can't be seen from here"),
        ({"fabric": "In Progress"}, False, "CUDA may fail with error 802"),
        ({"limit": "500.00"}, False, "its power limit is 500 W instead of 700"),
        ({"clock": 1200}, False, "its clock is set to 1200 MHz instead of 1980"),
        ({"hot": "Active"}, False, "slowed down without work (hw_thermal_slowdown)"),
    ],
)
def test_one_fault(differences: dict[str, object], fatal: bool, words: str) -> None:
    found = faults(cards(log(gpu(), gpu(**differences))))
    assert len(found) == 1
    assert found[0].is_fatal == fatal
    assert found[0].text.startswith("GPU 1: ")
    assert words in found[0].text


def test_a_process_is_named() -> None:
    process = PROCESS.format(pid=4321, kind="C", name="/usr/bin/python3", memory="3052 MiB")
    found = faults(cards(log(gpu(processes=process, used=3060))))
    assert found == [GpuFault("GPU 0: /usr/bin/python3 (pid 4321) is on it with 3.2 GB")]


def test_what_several_gpus_have_is_said_once() -> None:
    found = faults(cards(eight(limit="500.00")))
    assert [fault.text[:29] for fault in found] == ["GPUs 0, 1, 2, 3, 4, 5, 6, 7: "]


def test_an_old_gpu_has_several() -> None:
    found = [fault.text for fault in faults(cards(log(T4)))]
    assert [any(words in text for text in found) for words in ("2 uncorrectable", "reset", "60 W", "hw_slowdown")]
    assert len(found) == 5


def test_links_that_are_no_nvlink() -> None:
    gpus = cards(eight())
    assert [fault.text for fault in faults(gpus, links(matrix(odd="SYS")))] == [
        "GPU 0 and GPU 7 reach each other by SYS instead of NVLink: slow all-reduce"
    ]
    assert faults(gpus, links(matrix("PHB", odd="PHB")))[0].text.startswith("GPU 0 and GPU 1 and 27 more")
    assert not faults(gpus[:4], links(matrix(odd="SYS"))), "of GPUs that the run doesn't use"
    assert not faults(cards(eight(name="NVIDIA L4", fabric="N/A")), links(matrix("PHB", odd="PHB"))), "it has none"


@pytest.mark.parametrize(
    ("name", "switched"),
    [
        *((name, True) for name in ("NVIDIA A100-SXM4-40GB", "NVIDIA H200", "NVIDIA B200", "NVIDIA GB200")),
        *((name, False) for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L4", "Tesla V100-SXM2-16GB")),
    ],
)
def test_gpus_that_have_nvlink_in_the_cloud(name: str, switched: bool) -> None:
    assert bool(faults(cards(eight(name=name)), links(matrix("SYS", odd="SYS")))) == switched


def test_drivers_and_cuda() -> None:
    said = "driver 535.104.05 supports CUDA 12.2; this image has CUDA 13.0, which needs 580 or newer"
    assert cuda_fault("535.104.05", "12.2", "13.0") == GpuFault(said, is_fatal=True)
    assert cuda_fault("700.1", "13.9", "14.0") == GpuFault(
        "driver 700.1 supports CUDA 13.9; this image has CUDA 14.0, which needs a newer one", is_fatal=True
    )
    for driver, supports, image in [
        ("525.60.13", "12.0", "12.6"),
        ("535.104.05", "13.0", "13.0"),
        ("580.1", "13.0", "12.6"),
        ("", "", "13.0"),
        ("580.1", "13.0", ""),
    ]:
        assert cuda_fault(driver, supports, image) is None


@pytest.mark.parametrize(
    ("asked", "device", "same"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h100-mega", "NVIDIA H100 80GB HBM3", True),
        ("a100-40gb", "NVIDIA A100-SXM4-40GB", True),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("t4", "Tesla T4", True),
        ("l4", "NVIDIA L40S", False),
        ("h100", "NVIDIA H200", False),
        ("b200", "NVIDIA GB200", False),
        ("", "NVIDIA L4", False),
    ],
)
def test_names(asked: str, device: str, same: bool) -> None:
    assert is_gpu(asked, device) == same

"""What makes a machine unfit."""

from __future__ import annotations

import json
import os
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from launch_train.common.errors import UsageError
from launch_train.node import health_check
from launch_train.node.health_check import Facts, Findings, assess, inspect_machine, wanted_gpu, whole_number
from tests.train.monitoring.nvidiasmi import LOST, NO_DRIVER, PROCESS, eight, gpu, install, log, matrix

H100 = {"name": "NVIDIA H100", "min_driver": "535.104"}
GOOD = Facts(gpus=2, gpu="NVIDIA H100 80GB HBM3", driver="550.90.07", shm_bytes=8 << 30)


def test_a_good_machine_gives_nothing_to_say() -> None:
    assert assess(GOOD, processes=2, wanted=H100, cloud=True) == Findings()
    assert assess(Facts(0, "", "", None), processes=4, wanted={}, cloud=True) == Findings()


@pytest.mark.parametrize(
    ("facts", "processes", "line"),
    [
        (Facts(1, "x", "550.1", None), 2, "found 1 of 2 GPUs (NVIDIA H100)"),
        (Facts(0, "", "", None), None, "found 0 of 1 GPUs (NVIDIA H100)"),
        (Facts(2, "x", "535.99.01", None), 2, "the NVIDIA driver is 535.99.01, but the image needs 535.104 or newer"),
    ],
)
def test_in_the_cloud_it_is_the_end_and_elsewhere_a_warning(facts: Facts, processes: int | None, line: str) -> None:
    assert assess(facts, processes=processes, wanted=H100, cloud=True).unfit == line
    elsewhere = assess(facts, processes=processes, wanted=H100, cloud=False)
    assert elsewhere == Findings("", (f"{line}; continuing{'' if facts.gpus else ' on CPU'}",))


def test_too_little_shared_memory_is_a_warning() -> None:
    found = assess(Facts(0, "", "", 64 << 20), processes=1, wanted={}, cloud=True)
    assert found.unfit == ""
    assert found.warnings[0].startswith("shared memory (/dev/shm) has 64 MiB")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA L4, 550.90.07\\nNVIDIA L4, 550.90.07\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = inspect_machine({})
    assert (facts.gpus, facts.gpu, facts.driver) == (2, "NVIDIA L4", "550.90.07")
    assert [inspect_machine({"CUDA_VISIBLE_DEVICES": text}).gpus for text in ("", "1", "0,1", "0,-1", "-1")] == [
        0,
        1,
        2,
        1,
        0,
    ]
    uuids = "GPU-11aa22bb-1c3d-4e5f-8a9b-1234567890ab,GPU-0-1"
    listed = [(uuids, 2), (f"{uuids},-1", 2), ("0,,1", 1), (" 1 ,-1,0", 1), ("MIG-1-1,MIG-2,MIG-3", 3)]
    assert [inspect_machine({"CUDA_VISIBLE_DEVICES": text}).gpus for text, _ in listed] == [
        count for _, count in listed
    ]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert inspect_machine({}).gpus == 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a nvidia-smi is looked for first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_good_machine_of_eight(machine: Path) -> None:
    install(machine, query=eight(), topo=matrix())
    facts = inspect_machine({})
    assert (facts.gpus, facts.gpu, facts.driver, facts.cuda) == (8, "NVIDIA H100 80GB HBM3", "580.95.05", "13.0")
    assert (len(facts.cards), len(facts.links), facts.lost, facts.error) == (8, 8, (), "")
    wanted = {"name": "h100", "memory_gb": 80, "min_driver": "580"}
    assert assess(facts, processes=8, wanted=wanted, cloud=True) == Findings()
    assert json.loads(json.dumps(facts.to_dict()))["cards"][7]["name"] == "NVIDIA H100 80GB HBM3"


def test_another_gpu_than_was_asked_for_is_a_warning(machine: Path) -> None:
    install(machine, query=eight(name="NVIDIA L4", total=23034), topo=matrix("PHB", "PHB"))
    found = assess(inspect_machine({}), processes=8, wanted={"name": "h100", "memory_gb": 80}, cloud=True)
    assert found == Findings("", ("GPU 0 is NVIDIA L4, but h100 was requested",))
    install(machine, query=eight(name="NVIDIA A100-SXM4-40GB", total=40960), topo=matrix("NV12", "NV12"))
    found = assess(inspect_machine({}), processes=8, wanted={"name": "a100-80gb", "memory_gb": 80}, cloud=True)
    assert found == Findings("", ("GPU 0 has 43 GB, but 80 GB were requested",))


def test_the_cuda_of_the_image(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(machine, query=log(gpu(), driver="535.104.05", cuda="12.2"))
    torch = machine / "elsewhere" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('it is not imported to be asked')")
    (torch / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    spec = ModuleSpec("torch", None, origin=str(torch / "__init__.py"))
    monkeypatch.setattr("launch_train.node.health_check.find_spec", {"torch": spec}.get)
    said = "driver 535.104.05 supports CUDA 12.2; this image has CUDA 13.0, which needs 580 or newer"
    found = assess(inspect_machine({}), processes=1, wanted={"name": "h100", "min_driver": "580"}, cloud=True)
    assert found.unfit == said, "and the same isn't said twice"
    monkeypatch.setattr("launch_train.node.health_check.find_spec", lambda name: None)
    assert health_check._image_cuda() == ""


def test_a_machine_without_a_driver(machine: Path) -> None:
    install(machine, query=NO_DRIVER, code=9)
    found = assess(inspect_machine({}), processes=8, wanted={"name": "h100"}, cloud=True)
    assert found.unfit.startswith("found 0 of 8 GPUs (h100): nvidia-smi: NVIDIA-SMI has failed because")
    assert assess(inspect_machine({}), processes=None, wanted={}, cloud=True) == Findings()


def test_a_lost_gpu(machine: Path) -> None:
    install(machine, query=LOST + log(gpu(), gpu()), topo=matrix(count=2))
    found = assess(inspect_machine({}), processes=None, wanted={"name": "h100"}, cloud=True)
    assert found.unfit.startswith("a GPU is lost; it needs a reset or another machine: nvidia-smi: Unable to")
    install(machine, query=LOST, code=15)
    found = assess(inspect_machine({}), processes=2, wanted={"name": "h100"}, cloud=True)
    assert found.unfit == f"found 0 of 2 GPUs (h100): nvidia-smi: {LOST.strip()}"


def test_only_gpus_that_the_run_sees_are_looked_at(machine: Path) -> None:
    process = PROCESS.format(pid=77, kind="C", name="blender", memory="512 MiB")
    install(machine, query=log(gpu(), gpu(processes=process)))
    assert inspect_machine({}).to_dict()["cards"][1]["processes"][0]["name"] == "blender"
    for shown, warned in (("0", False), ("1", True), (None, True), ("GPU-1", True), ("", False), ("-1", False)):
        env = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
        found = assess(inspect_machine(env), processes=None, wanted={}, cloud=True)
        assert any("blender (pid 77)" in line for line in found.warnings) == warned, shown


def test_in_a_rehearsal_all_of_it_warns(machine: Path) -> None:
    install(machine, query=log(gpu(recovery="Reset", dram=2)))
    found = assess(inspect_machine({}), processes=1, wanted={}, cloud=False)
    assert found.unfit == ""
    assert found.warnings[0].endswith("use another machine; continuing")
    assert found.warnings[1] == "GPU 0: 2 uncorrectable memory errors since the driver was loaded"
    unfit = assess(inspect_machine({}), processes=1, wanted={}, cloud=True).unfit
    assert unfit.startswith("GPU 0: the driver requests a reset")


def test_a_driver_that_hangs_does_not_hold_the_start_for_ever(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (machine / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(health_check, "SMI_SECONDS", 0.3)
    began = time.monotonic()
    facts = inspect_machine({})
    assert time.monotonic() - began < 20
    assert (facts.gpus, facts.error) == (0, "no output for 0 seconds")


def test_a_program_that_can_not_be_started(machine: Path) -> None:
    (machine / "nvidia-smi").write_text("no program")
    (machine / "nvidia-smi").chmod(0o755)
    assert inspect_machine(os.environ).gpus == 0


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5", "²"])
def test_numbers_of_the_request(text: str) -> None:
    with pytest.raises(UsageError, match=r"N='.*' must be a whole number from 1"):
        whole_number({"N": text}, "N", least=1)
    assert whole_number({}, "N", least=1) is None
    assert whole_number({"N": "3"}, "N", least=1) == 3


def test_the_gpu_of_the_request() -> None:
    assert wanted_gpu({"LAUNCH_GPU": json.dumps(H100)}) == H100
    assert wanted_gpu({}) == {}
    for text in ("[", "[]"):
        with pytest.raises(UsageError, match="LAUNCH_GPU"):
            wanted_gpu({"LAUNCH_GPU": text})

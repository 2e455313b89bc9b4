"""What makes a machine unfit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.checks import Facts, Findings, gather, judge, wanted_gpu, whole_number
from train.errors import UsageError

H100 = {"name": "NVIDIA H100", "min_driver": "535.104"}
GOOD = Facts(gpus=2, gpu="NVIDIA H100 80GB HBM3", driver="550.90.07", shm_bytes=8 << 30)


def test_a_good_machine_gives_nothing_to_say() -> None:
    assert judge(GOOD, processes=2, wanted=H100, cloud=True) == Findings()
    assert judge(Facts(0, "", "", None), processes=4, wanted={}, cloud=True) == Findings()


@pytest.mark.parametrize(
    ("facts", "processes", "line"),
    [
        (Facts(1, "x", "550.1", None), 2, "1 of 2 GPUs (NVIDIA H100) are visible"),
        (Facts(0, "", "", None), None, "0 of 1 GPUs (NVIDIA H100) are visible"),
        (Facts(2, "x", "535.99.01", None), 2, "the NVIDIA driver is 535.99.01, but the image needs 535.104 or newer"),
    ],
)
def test_in_the_cloud_it_is_the_end_and_elsewhere_a_warning(facts: Facts, processes: int | None, line: str) -> None:
    assert judge(facts, processes=processes, wanted=H100, cloud=True).unfit == line
    elsewhere = judge(facts, processes=processes, wanted=H100, cloud=False)
    assert elsewhere == Findings("", (f"{line}; going on, as this is not the cloud",))


def test_too_little_shared_memory_is_a_warning() -> None:
    found = judge(Facts(0, "", "", 64 << 20), processes=1, wanted={}, cloud=True)
    assert found.unfit == ""
    assert found.warnings[0].startswith("shared memory (/dev/shm) has 64 MiB")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA L4, 550.90.07\\nNVIDIA L4, 550.90.07\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = gather({})
    assert (facts.gpus, facts.gpu, facts.driver) == (2, "NVIDIA L4", "550.90.07")
    assert [gather({"CUDA_VISIBLE_DEVICES": text}).gpus for text in ("", "1", "0,1", "0,-1", "-1")] == [0, 1, 2, 1, 0]
    uuids = "GPU-11aa22bb-1c3d-4e5f-8a9b-1234567890ab,GPU-0-1"
    listed = [(uuids, 2), (f"{uuids},-1", 2), ("0,,1", 1), (" 1 ,-1,0", 1), ("MIG-1-1,MIG-2,MIG-3", 3)]
    assert [gather({"CUDA_VISIBLE_DEVICES": text}).gpus for text, _ in listed] == [count for _, count in listed]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gather({}).gpus == 0


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

"""What is far too slow: decided on figures that were made up. And the table of peaks, held equal to the catalog."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch_train.bench import peaks
from launch_train.bench.figures import BenchFigure, Measured, Trouble
from launch_train.bench.verdict import (
    WIDTH,
    Report,
    judge,
    reference_figures,
    table,
    to_dict,
)
from launcher import catalog

H200 = "NVIDIA H200"
WELL: dict[str, float] = {"matmul fp32": 52, "matmul tf32": 400, "matmul bf16": 790, "memory copy": 4200}
COPIES: dict[str, float] = {"to GPU, pinned": 55, "from GPU, pinned": 55}


def measured(rank: int = 0, figures: Mapping[str, float] = WELL, device: str = H200, **more: Any) -> Measured:
    units = {"matmul": "TFLOP/s", "memory": "GB/s", "to": "GB/s", "from": "GB/s", "all-reduce": "GB/s"}
    found = tuple(BenchFigure(name, value, units.get(name.split()[0], "x")) for name, value in figures.items())
    more = {"node": 0, "gpu": rank, "host": "h", **more}
    return Measured(rank=rank, device=device, figures=found, **more)


def report(*ranks: Measured, asked: Mapping[str, float | None] | None = None) -> Report:
    return Report(ranks, asked or {}, quick=True, torch="2.13.0+cu126", time=1.7e9, seconds=31.0)


def texts(*ranks: Measured, unfit: bool = True) -> list[str]:
    return [finding.text for finding in judge(ranks, {}) if finding.unfit is unfit]


# --- Against the peak -------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_well_has_no_finding() -> None:
    assert judge([measured(figures={**WELL, **COPIES}, pcie=(5, 16))], {}) == []
    assert "all figures are as fast as expected" in table(report(measured()))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("matmul bf16", 490, "matmul bf16 reaches 490 of 989: 50 %"),
        ("matmul fp32", 33, "matmul fp32 reaches 33 of 67: 49 %"),
        ("memory copy", 3300, "memory copy reaches 3,300 of 4,800: 69 %"),
    ],
)
def test_what_is_below_its_floor_is_named_with_its_share(name: str, value: float, says: str) -> None:
    assert texts(measured(figures={**WELL, name: value})) == [f"GPU 0 of node 0: {says}"]
    assert texts(measured(figures={**WELL, name: value * 1.02})) == []


def test_a_card_that_cannot_hold_its_clocks_is_asked_for_less() -> None:
    healthy = {"matmul fp32": 10.66, "matmul tf32": 25.69, "matmul fp16": 53.8, "matmul bf16": 59.4}
    assert texts(measured(figures=healthy, device="NVIDIA L4")) == []
    assert len(texts(measured(figures={**healthy, "matmul bf16": 28}, device="NVIDIA L4"))) == 1


def test_a_link_of_half_its_lanes() -> None:
    shared = measured(figures={**WELL, "to GPU, pinned": 8.0}, pcie=(4, 16))
    assert texts(shared) == [], "two GPUs behind one link, and their memory beside the other processor"
    slow = measured(figures={**WELL, "to GPU, pinned": 6.1}, pcie=(5, 16))
    assert texts(slow) == ["GPU 0 of node 0: to GPU, pinned reaches 6.1 of 63.02: 10 %"]
    assert texts(slow._replace(pcie=None)) == []  # a VM that doesn't say which link there is


def test_gpus_that_found_no_nvlink() -> None:
    ranks = [measured(n, {**WELL, "all-reduce 1 MB": 5, "all-reduce 64 MB": 20}) for n in range(2)]
    assert texts(*ranks) == ["all-reduce 64 MB reaches 20 of 450: 4 %"]
    two_nodes = [ranks[0], ranks[1]._replace(node=1)]
    assert texts(*two_nodes) == []  # over the network: its rate isn't known here


def test_a_part_that_could_not_be_measured_is_a_fault_but_for_the_hosts_own() -> None:
    broken = measured(troubles=(Trouble("memory", "CUDA error: uncorrectable ECC error encountered"),))
    assert "memory could not be measured: CUDA error: uncorrectable ECC" in texts(broken)[0]
    no_pillow = measured(troubles=(Trouble("loader", "No module named 'PIL'"),))
    assert (texts(no_pillow), len(texts(no_pillow, unfit=False))) == ([], 1)


def test_mixed_precision_that_gains_little_is_only_told() -> None:
    name = "GPT bf16/fp32"
    assert texts(measured(figures={**WELL, name: 1.2}), unfit=False) == [f"{name} is 1.20; expected: 1.5 or more"]
    assert judge([measured(figures={**WELL, name: 1.6})], {}) == []
    assert judge([measured(figures={"GPT fp16/fp32": 0.9}, device="Tesla P100-PCIE-16GB")], {}) == []


def test_an_unknown_gpu_is_held_against_nothing() -> None:
    stranger = measured(figures={"matmul bf16": 1e-3}, device="NVIDIA A10G")
    assert texts(stranger) == []
    assert "unknown peak" in texts(stranger, unfit=False)[0]
    asked = {"bf16": 70.0}  # but what the request says counts
    assert [one.unfit for one in judge([stranger], asked)] == [True]


def test_the_processor_is_held_against_nothing() -> None:
    slow, quick = (measured(n, {"matmul fp32": value}, device="cpu") for n, value in enumerate((0.01, 0.1)))
    assert judge([slow, quick], {}) == []
    assert list(table(report(slow, quick)))[-1] == "no GPU, so no reference figures to compare with"


# --- Against the others -----------------------------------------------------------------------------------------------


def test_the_slow_gpu_of_eight_is_named() -> None:
    ranks = [measured(n, node=n // 4, gpu=n % 4) for n in range(8)]
    ranks[7] = measured(7, {**WELL, "matmul bf16": 790 * 0.6, "matmul tf32": 380}, node=1, gpu=3)
    below, slower = sorted(texts(*ranks), key=len)
    assert slower == "GPU 3 of node 1 is 40 % slower than the others (matmul bf16)"
    assert "reaches 474 of 989" in below


@pytest.mark.parametrize(
    ("share", "unfit", "found"), [(0.05, False, 0), (0.12, False, 1), (0.19, False, 1), (0.21, True, 1)]
)
def test_how_slow_is_too_slow(share: float, unfit: bool, found: int) -> None:
    ranks = [measured(n, {"matmul bf16": 800.0 * (1 - share * (n == 1))}) for n in range(2)]
    findings = judge(ranks, {})
    assert [one.unfit for one in findings] == [unfit] * found
    assert all(one.text.startswith("GPU 1 of node 0 is") and "than the other (" in one.text for one in findings)


@given(st.lists(st.floats(1e-3, 5e3), min_size=1, max_size=9))
def test_whatever_comes_is_judged_and_fits(figures: list[float]) -> None:
    ranks = [
        measured(n, {"matmul bf16": value, "to GPU, pinned": value}, pcie=(4, 16)) for n, value in enumerate(figures)
    ]
    shown = report(*ranks)
    assert max(map(len, table(shown))) <= WIDTH
    assert bool(to_dict(shown)["ok"]) is not any(finding.unfit for finding in judge(ranks, {}))
    if min(figures) >= 600 and max(figures) < 1.1 * min(figures):
        assert judge(ranks, {}) == []


# --- The table and the JSON -------------------------------------------------------------------------------------------


def test_the_table() -> None:
    ranks = [measured(n, {**WELL, "all-reduce 64 MB": 300, "matmul bf16": 790 - n}) for n in range(2)]
    assert list(table(report(*ranks))) == [
        "2 x NVIDIA H200, torch 2.13.0+cu126, 31 s",
        "                  median    min           of peak",
        "matmul fp32           52     52  TFLOP/s  78 % of 67",
        "matmul tf32          400    400  TFLOP/s  81 % of 494.5",
        "matmul bf16          790    789  TFLOP/s  80 % of 989",
        "memory copy        4,200  4,200  GB/s     88 % of 4800",
        "all-reduce 64 MB     300    300  GB/s     67 % of 450",
        "all figures are as fast as expected",
    ]


def test_the_json_has_every_rank_and_the_least_of_them() -> None:
    ranks = [measured(n, {"matmul bf16": 790 - 300 * n}) for n in range(2)]
    data = json.loads(json.dumps(to_dict(report(*ranks))))
    assert data["figures"]["matmul bf16"] == {"value": 640, "least": 490, "unit": "TFLOP/s", "peak": 989}
    assert [one["figures"]["matmul bf16"]["value"] for one in data["ranks"]] == [790, 490]
    assert (data["ok"], data["schema"], data["world_size"]) == (False, 1, 2)
    assert [one["unfit"] for one in data["findings"]] == [True, True]


# --- Peaks ------------------------------------------------------------------------------------------------------------

CUDA = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-mega": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "l4": "NVIDIA L4",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "t4": "Tesla T4",
    "v100": "Tesla V100-SXM2-16GB",
    "p100": "Tesla P100-PCIE-16GB",
    "p4": "Tesla P4",
}
"""What CUDA calls the GPUs that Google rents out."""


def test_every_gpu_of_the_catalog_has_the_same_peaks_here() -> None:
    gpus = catalog.load().gpus.values()
    assert {gpu.name for gpu in gpus} == set(CUDA)
    for gpu in gpus:
        card = peaks.of(CUDA[gpu.name])
        assert card is not None, gpu.name
        assert dict(card.tflops) == dict(gpu.peak_tflops), gpu.name
        assert card.name == gpu.name or (card.name, gpu.name) == ("h100", "h100-mega")


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA L40S",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "cpu",
        "",
    ],
)
def test_another_gpu_of_nearly_the_same_name_is_unknown(device: str) -> None:
    assert peaks.of(device) is None


def test_no_two_rows_fit_the_same_gpu() -> None:
    with peaks.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] for row in rows)
    for device in {*CUDA.values(), "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"}:
        present = peaks._words(device)
        fitting = [card for words, without, card in peaks._table() if words <= present and not without & present]
        assert len(fitting) == 1, device


def test_the_requests_peaks_count_for_the_gpu_that_was_asked_for() -> None:
    text = json.dumps({"name": "h100-mega", "peak_tflops": {"bf16": 989, "fp32": None}})
    assert peaks.requested(text, CUDA["h100"]) == {"bf16": 989, "fp32": None}
    assert peaks.requested(text, CUDA["l4"]) == peaks.requested("", CUDA["l4"]) == peaks.requested("no JSON", "x") == {}
    assert peaks.requested(text, "NVIDIA H100 80GB HBM3 MIG 1g.10gb") == {}, "a part of one"
    held = reference_figures([measured()], measured(), {"bf16": 1000.0, "fp32": None})
    assert (held["matmul bf16"].peak, held["matmul fp32"].peak) == (1000, 67)

"""`launch estimate`: memory by part, speed, time, cost; the largest models; custom models in a process with limits."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.inputs import estimating
from tests.command import SPECS, Ran, launch

HUGE = "{name: gpt, n_layer: 1000, n_head: 1000, n_embd: 100000, block_size: 1000000, vocab_size: 10000000}"


def data(*argv: str | Path) -> dict[str, Any]:
    """The estimate as JSON."""
    ran = launch("estimate", *argv, "-o", "json")
    assert ran.code == 0, ran.shown
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize("spec", ["vertex-2xh100", "vertex-2xa100-80gb", "vertex-multinode", "hf-llama", "own-script"])
def test_the_page_fits_80_columns(spec: str) -> None:
    ran = launch("estimate", SPECS / f"{spec}.yaml")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80


def test_what_an_estimate_has() -> None:
    found = data(SPECS / "vertex-2xh100.yaml")
    assert found["fits"] is True
    assert found["parameters"] == 124_373_760
    assert sum(part["bytes"] for part in found["parts"]) == found["bytes"]
    assert found["choices"][0] == {"flags": "", "micro_batch": found["micro_batch"], "limited_by": "memory"}
    assert found["speed"]["basis"].startswith("measured")
    assert {offer["provisioning"] for offer in found["offers"]} == {"flex-start", "spot"}
    work = found["steps"] * found["batch_size"] * 1024 / found["speed"]["per_second"] / 3600
    for offer in found["offers"]:
        assert offer["hours"] == pytest.approx(work + offer["lost_hours"])
        assert offer["usd"] == pytest.approx(offer["hours"] * offer["usd_per_hour"])
    spot = next(offer for offer in found["offers"] if offer["provisioning"] == "spot")
    assert spot["interruptions"] == pytest.approx(work / 160)


@pytest.mark.parametrize(
    "change",
    ["precision=fp32", "compile=false", "activation_checkpointing=full", "model={name: gpt2-124m, n_layer: 6}"],
)
def test_a_speed_measured_elsewhere_is_for_the_same_run(change: str) -> None:
    found = data(SPECS / "vertex-2xh100.yaml", "--set", f"run.config.{change}")
    assert found["speed"]["basis"].startswith("assumed")


def test_another_gpu_and_no_project() -> None:
    ran = launch(
        "estimate",
        "--type",
        "t4",
        "--set",
        "run.config.model=gpt2-medium",
        "-o",
        "json",
        env={"CLOUDSDK_CORE_PROJECT": ""},
    )
    found = json.loads(ran.out)
    assert "40 % MFU of 65" in found["speed"]["basis"]
    assert {one["provisioning"] for one in found["offers"]} >= {"standard", "spot"}


def test_a_model_that_does_not_fit() -> None:
    """It is not refused: the estimate shows how much memory it needs, and which machine it fits."""
    found = data("--type", "t4", "--gpus", "1", "--set", "run.config.model=gpt2-xl")
    assert found["fits"] is False
    assert {choice["micro_batch"] for choice in found["choices"]} == {None}
    assert found["speed"] is None
    assert found["smallest"]["gpus"] >= 1
    assert all(offer["usd"] is None for offer in found["offers"])


def test_a_model_of_ten_trillion_parameters_and_more() -> None:
    found = data("--type", "h100", "--gpus", "8", "--set", f"run.config.model={HUGE}")
    assert found["parameters"] > 100e12
    assert (found["fits"], found["smallest"]) == (False, None)
    ran = launch("estimate", "--type", "h100", "--gpus", "8", "--set", f"run.config.model={HUGE}")
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80


def test_a_model_without_a_spec() -> None:
    """`hf:TYPE` is estimated with 1,024 tokens a sample; --set changes that and the model's settings."""
    wide = ("--set", "run.config.model.num_hidden_layers=2", "--set", "run.config.data.block_size=512")
    found = data("hf:llama", "--type", "h100", "--gpus", "8")
    assert (found["model"], found["sample_units"], found["machine"]["gpus"]) == ("hf:llama", 1024, 8)
    small = data("hf:llama", "--type", "h100", *wide)
    assert small["parameters"] < found["parameters"] / 8
    assert small["sample_units"] == 512
    ran = launch("estimate", "gpt2-124m", "--type", "h100")
    assert ran.code == 0
    assert "gpt2-124m, 124 M parameters" in ran.out
    assert "samples of 1,024 tokens" in ran.out


def test_the_batch_that_limits_the_micro_batch_is_named() -> None:
    """Eight samples a GPU fit many times over: more memory would not help, a larger batch_size would."""
    few = ("gpt2-124m", "--type", "h100", "--gpus", "2", "--set", "run.config.batch_size=16")
    assert data(*few)["choices"][0] == {"flags": "", "micro_batch": 8, "limited_by": "batch_size"}
    assert "8 (limit: batch_size)" in launch("estimate", *few).out


def test_a_misspelled_model_names_similar_ones() -> None:
    ran = launch("estimate", "gpt2-124")
    assert ran.code == 2
    assert "gpt2-124 is neither a file nor a built-in model" in ran.err
    assert "gpt2-124m" in ran.err


@pytest.mark.slow
def test_an_uncached_hub_model_is_refused_with_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    ran = launch("estimate", "hf:nobody/nothing", "--type", "h100")
    assert ran.code == 2
    assert "HF_HUB_OFFLINE" not in ran.shown
    assert "hf download nobody/nothing config.json" in ran.err


def test_the_largest_models() -> None:
    ran = launch("estimate", "--vram", "24GB", "-o", "json")
    rows = {row["use"]: row for row in json.loads(ran.out)}
    assert len(rows) == 5
    assert rows["inference, bf16"]["parameters"] == pytest.approx(2 * rows["inference, fp32"]["parameters"], rel=0.001)
    assert all(row["parameters"] * row["bytes_per_parameter"] < 24e9 for row in rows.values())
    assert rows["AdamW, fp32"]["model"] == "gpt2-large"
    assert max(map(len, launch("estimate", "--vram", "24GB").out.splitlines())) <= 80


@pytest.mark.parametrize(
    "argv",
    [
        ("--vram", "lots"),
        ("--vram", "0"),
        ("--vram", "24GB", "--gpus", "2"),
        ("--type", "h1000"),
        ("--set", "run.config.model=gpt5"),
    ],
    ids=" ".join,
)
def test_wrong_arguments(argv: tuple[str, ...]) -> None:
    ran = launch("estimate", *argv)
    assert ran.code == 2
    assert ran.err.startswith("error: ")


# --- Custom models ----------------------------------------------------------------------------------------------------

MODEL = """
import os, sys, time
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, 256)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def build():
    {first}
    return Model()
"""


def estimated(folder: Path, first: str) -> Ran:
    """The estimate of a spec with a custom model, which does `first`."""
    (folder / "mine.py").write_text(MODEL.replace("{first}", first))
    job = folder / "job.yaml"
    job.write_text(
        "name: job\nmachine: {type: l4, gpus: 1}\nregions: [us-central1]\nimage: {code: .}\nrun:\n  config:\n"
        "    model: mine:build\n    data: {path: python-stdlib, block_size: 16}\n    batch_size: 8\n"
    )
    return launch("estimate", job, "-o", "json")


@pytest.mark.slow
def test_a_custom_model(tmp_path: Path) -> None:
    ran = estimated(tmp_path, "print('hello')")
    assert ran.code == 0, ran.shown
    found = json.loads(ran.out)
    assert found["parameters"] == 256 * 32 + 3 * (32 * 64 + 64 + 64 * 32 + 32) + 32 * 256 + 256
    assert found["fits"] is True
    assert "measured" in found["note"]
    parts = {part["name"]: part["bytes"] for part in found["parts"]}
    # Under autocast, per token: block inputs in half precision, GELU's input and result; the head's input, the loss.
    least = 16 * 8 * (3 * (2 * 32 + 2 * 64 + 2 * 64) + 2 * 32 + 3 * 4 * 256)
    assert parts["activations"] == pytest.approx(least, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("bytearray(8 << 30)", "real memory"),
        ("raise ValueError('no such shape')", "no such shape"),
        ("sys.exit(0)", "can't be estimated"),
        ("os._exit(3)", "exit code 3"),
    ],
)
def test_a_custom_model_that_fails(tmp_path: Path, first: str, says: str) -> None:
    ran = estimated(tmp_path, first)
    assert ran.code == 2
    assert f"{tmp_path}/job.yaml:7: " in ran.err
    assert says in ran.err
    assert "Traceback" not in ran.shown


@pytest.mark.slow
def test_a_custom_model_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, with what it started."""
    started: list[int] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(estimating, "SECONDS", 6.0)
    ran = estimated(tmp_path, "time.sleep(1e6)")
    assert ran.code == 2
    assert "within 6 s" in ran.err
    with pytest.raises(ProcessLookupError):
        os.killpg(started[0], 0)


def test_without_torch_a_custom_model_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = estimated(tmp_path, "pass")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert (found["bytes"], found["fits"]) == (None, None)
    assert "gcp-launch[train]" in found["note"]

"""For each row of the GPU acceptance: what is measured where all is well, and changes to it that its check refuses."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_acceptance import gputests
from benchmarks.gpu_acceptance.ablation import variants

Case = tuple[dict[str, Any], dict[str, dict[str, Any]]]

LOSSES = [4.0, 3.5, 3.0, 2.5]
NEAR = [4.0, 3.52, 2.99, 2.51]
FAR = [4.0, 3.9, 3.4, 2.9]
FLAT = [4.0, 4.0, 4.0, 4.0]
NAN = [4.0, 3.5, float("nan"), 2.5]

LEARNS: dict[str, dict[str, Any]] = {
    "other losses": {"reference": FAR},
    "does not learn": {"losses": FLAT, "reference": FLAT},
    "a loss that is no number": {"losses": NAN},
    "a step is missing": {"losses": LOSSES[:3]},
}


def numbers(kind: str) -> Case:
    good = {"kind": kind, "precision": kind, "losses": NEAR, "reference": LOSSES, "choices": {}}
    broken = {**LEARNS, "another precision": {"precision": "fp64"}}
    if kind != "fp32":
        broken["the very bits of fp32"] = {"losses": LOSSES}
    return good, broken


def attention(kernel: str) -> Case:
    good = {"kernel": kernel, "losses": NEAR, "reference": LOSSES, "choices": {"attention": kernel}}
    return good, {**LEARNS, "another kernel": {"choices": {}}}


def compiled(mode: str, **choices: str) -> Case:
    good = {"mode": mode, "losses": NEAR, "reference": LOSSES, "choices": {"compile": mode, **choices}}
    broken = {**LEARNS, "not compiled": {"choices": {"compile": "false", **choices}}}
    return good, broken | ({"no graphs": {"choices": {"compile": mode}}} if choices else {})


def killed(chosen: str, *, compiled: bool) -> Case:
    good = {"codes": [-9, 0], "steps": 4, "resumed": [2], "losses": LOSSES, "reference": LOSSES, "said": ""}
    broken: dict[str, dict[str, Any]] = {
        "one bit of one loss": {"losses": [*LOSSES[:3], 2.5000000000000004]},
        "it was not killed": {"codes": [0, 0]},
        "from the beginning": {"resumed": []},
    }
    more = {"not compiled": {"compile": ["false", True]}} if compiled else {}
    return {**good, "sha256": ["ab", "ab"], "compile": [chosen, compiled]}, broken | more


def two_ranks(backend: str) -> Case:
    good = {"backend": backend, "world_size": 2, "expected": [backend, 2], "losses": NEAR, "reference": LOSSES}
    return good, {**LEARNS, "no DDP": {"backend": "no DDP"}, "one rank only": {"world_size": 1}}


def activations() -> Case:
    good = {"losses": LOSSES, "reference": LOSSES, "without_gb": 2.0, "with_gb": 1.0}
    return good, {"no less memory": {"with_gb": 1.9}, "other losses": {"losses": NEAR}}


def tested() -> Case:
    good = {"outcomes": {"passed": ["a", "b"], "skipped": ["c"]}, "end": ["2 passed"]}
    return good, {
        "a failure": {"outcomes": {"passed": ["a"], "failed": ["b"]}},
        "an error": {"outcomes": {"passed": ["a"], "error": ["b"]}},
        "nothing ran": {"outcomes": {}},
        "all skipped": {"outcomes": {"skipped": ["a"]}},
    }


def bound(expected: str) -> Case:
    other = "compute" if expected != "compute" else "memory"
    shares = {expected: 0.8, other: 0.1}
    good = {"expected": expected, "bound": expected, "shares": shares, "step_s": 0.01, "advice": "…"}
    return good, {"another verdict": {"bound": other}}


SMI = {
    "memory.used": "8200",
    "memory.total": "81559",
    "temperature.gpu": "40",
    "power.draw": "300.5",
    "enforced.power.limit": "700.00",
    "clocks.mem": "2619",
}
NVML = {
    "gpu": 0,
    "memory_gb": 9.1,
    "memory_total_gb": 85.52,
    "temp_c": 41,
    "power_w": 310.0,
    "power_limit_w": 700.0,
    "memory_mhz": 2619,
}

PART_1: dict[str, Case] = {
    "facts": (
        {
            "gpus": 1,
            "smi": [{"name": "NVIDIA H200"}],
            "torch": {"version": "2.11.0+cu130", "names": ["NVIDIA H200"], "cudnn": 91002, "nccl": "2.28.3"},
            "product": 64.0**3,
        },
        {
            "an old torch": {"torch": {"version": "2.9.1", "names": ["NVIDIA H200"], "cudnn": 1, "nccl": "2"}},
            "a wrong product": {"product": 64.0**3 - 64},
            "another GPU": {"smi": [{"name": "NVIDIA L4"}]},
            "nvidia-smi says nothing": {"smi": []},
            "no NCCL": {"torch": {"version": "2.11.0", "names": ["NVIDIA H200"], "cudnn": 1, "nccl": ""}},
        },
    ),
    "imports": (
        {"count": 150, "failed": {}},
        {
            "one fails": {"failed": {"launch_train.distributed.process_group": "ImportError: …"}},
            "none were found": {"count": 0},
        },
    ),
    "health": (
        {
            "gpus": 1,
            "here": 1,
            "driver": "580.1",
            "cuda": "13.0",
            "unfit": "",
            "warnings": [],
            "cards": [{"name": "NVIDIA H200", "memory_gb": 150.8}],
        },
        {
            "unfit": {"unfit": "GPU 0: it needs a reset"},
            "a GPU is not counted": {"gpus": 0},
            "no driver": {"driver": ""},
            "no memory": {"cards": [{"name": "NVIDIA H200", "memory_gb": None}]},
            "no cards": {"cards": []},
        },
    ),
    "nvml": (
        {"held_gb": 8.0, "nvml": [NVML], "smi": [SMI]},
        {
            "memory off by a fifth": {"nvml": [{**NVML, "memory_gb": 1.2 * 9.1}]},
            "total off by a fifth": {"nvml": [{**NVML, "memory_total_gb": 0.8 * 85.5}]},
            "power off by a fifth": {"nvml": [{**NVML, "power_limit_w": 560.0}]},
            "temperature off": {"nvml": [{**NVML, "temp_c": 55}]},
            "draws half": {"nvml": [{**NVML, "power_w": 150.0}]},
            "clocks off by a fifth": {"nvml": [{**NVML, "memory_mhz": 2100}]},
            "what is held is not seen": {"held_gb": 20.0},
            "no NVML": {"nvml": []},
            "one GPU is not seen": {"smi": [SMI, SMI]},
            "nothing to compare": {"smi": [{"memory.used": "[N/A]"}]},
        },
    ),
    "nccl": (
        {
            "backend": "nccl",
            "world": 2,
            "expected": ["nccl", 2],
            "wrong": [],
            "checked": 9,
            "gbs": {"all-reduce 16 MB": 200.0},
        },
        {
            "another backend": {"backend": "gloo"},
            "a wrong sum": {"wrong": ["rank 1: all-reduce of 1"]},
            "nothing was checked": {"checked": 0},
            "no bandwidth": {"gbs": {}},
            "bandwidth of nothing": {"gbs": {"all-reduce 16 MB": 0.0}},
            "ranks are missing": {"world": 1},
        },
    ),
    "ddp": (
        {"backend": "nccl", "world_size": 2, "expected": ["nccl", 2], "losses": NEAR, "reference": LOSSES},
        {**LEARNS, "another backend": {"backend": "gloo"}, "one rank only": {"world_size": 1}},
    ),
    "bench": (
        {
            "gpus": 1,
            "ok": True,
            "findings": [],
            "troubles": [],
            "figures": {
                "memory copy": [3000.0, "GB/s", 3350],
                "matmul bf16": [700.0, "TFLOP/s", 989],
                "to GPU, pinned": [50.0, "GB/s", None],
            },
        },
        {
            "far too slow": {"ok": False},
            "a part failed": {"troubles": [["amp", "CUDA error"]]},
            "a figure is missing": {"figures": {"memory copy": [3000.0, "GB/s", 3350]}},
            "a figure of nothing": {
                "figures": {
                    "memory copy": [0.0, "GB/s", 3350],
                    "matmul bf16": [700.0, "TFLOP/s", 989],
                    "to GPU, pinned": [50.0, "GB/s", None],
                }
            },
        },
    ),
    **{kind: numbers(kind) for kind in ("fp32", "bf16", "tf32")},
    "fp16": (
        {"precision": "fp16", "losses": LOSSES, "reference": LOSSES, "skipped": [1, 2, 3], "scale": 2.0**21},
        {
            "nothing was skipped": {"skipped": [], "scale": 2.0**24},
            "skipped later": {"skipped": [1, 2, 9]},
            "skipped always": {"skipped": list(range(1, 31)), "scale": 2.0**-6},
            "the scale stays": {"scale": 2.0**24},
            "another precision": {"precision": "bf16"},
            "does not learn": {"losses": FLAT},
        },
    ),
    **{f"attention {kernel}": attention(kernel) for kernel in ("flash", "efficient", "cudnn", "math")},
    **{f"activation checkpointing {kind}": activations() for kind in ("selective", "full")},
    "fsdp on one GPU": (
        {"losses": LOSSES, "reference": LOSSES, "choices": {"parallel": "fsdp"}},
        {**LEARNS, "losses nearly alike": {"losses": NEAR}, "not in use": {"choices": {"parallel": "none"}}},
    ),
    "memory probe": (
        {"chosen": 512, "share": 4096, "predicted_gb": 2.2, "memory_gb": 2.1},
        {
            "takes a third more": {"memory_gb": 2.9},
            "takes far less": {"memory_gb": 1.0, "predicted_gb": 1.0, "chosen": 64},
            "all of it fitted": {"chosen": 4096},
            "over the limit": {"memory_gb": 3.1, "predicted_gb": 3.0},
            "no prediction": {"predicted_gb": None},
        },
    ),
    "out of memory": (
        {
            "out_of_memory": [4],
            "micro": [0, 0, 0, 8, 8],
            "steps": 5,
            "losses": LOSSES,
            "reference": LOSSES,
        },
        {
            "it did not happen": {"out_of_memory": [], "micro": [0] * 5},
            "in another step": {"out_of_memory": [2]},
            "not survived": {"micro": [0, 0, 0]},
            "whole again": {"micro": [0, 0, 0, 8, 0]},
            "other losses": {"losses": FAR},
        },
    ),
    **{f"compile {mode}": compiled(mode) for mode in ("regional", "whole")},
    "cuda graphs": compiled("whole", **{"cuda graphs": "true"}),
    "resume": (
        {
            "codes": [75, 0],
            "steps": 4,
            "resumed": [2],
            "losses": LOSSES,
            "reference": LOSSES,
            "sha256": ["ab", "ab"],
            "said": "",
        },
        {
            "one bit of one loss": {"losses": [*LOSSES[:3], 2.5000000000000004]},
            "other parameters": {"sha256": ["ab", "ac"]},
            "no parameters": {"sha256": ["", ""]},
            "it ended before": {"codes": [0, 0], "resumed": []},
            "it failed after": {"codes": [75, 1]},
            "from the beginning": {"resumed": []},
            "steps are missing": {"losses": LOSSES[:3], "reference": LOSSES[:3]},
        },
    ),
    "killed and resumed": killed("false", compiled=False),
    "compiled, killed and resumed": killed("regional", compiled=True),
    **{f"two ranks on one GPU, {name}": two_ranks(name.lower()) for name in ("gloo", "NCCL")},
    "cuda sanitizer": (
        {"races": 0, "steps": 60, "gpus": 1},
        {"a race": {"races": 1}, "steps are missing": {"steps": 9}},
    ),
    "cuda graphs out of memory": (
        {"error": "rank 0 is out of memory …; set run.config.micro_batch_size: 8, which …", "half": 8},
        {"it went on": {"error": ""}, "another size": {"half": 4}},
    ),
    "cuda graphs with evaluations": compiled("whole", **{"cuda graphs": "true"}),
    "checkpoint beside training": (
        {
            "gpus": 1,
            "saved": 8,
            "typical_s": [0.01, 0.0102],
            "mean_s": [0.01, 0.0105],
            "longest_s": [0.011, 0.02],
        },
        {"none was written": {"saved": 0}, "steps take longer": {"typical_s": [0.01, 0.013]}},
    ),
    "script": (
        {
            "codes": [0, 0],
            "losses": {str(step): 1 / step for step in range(10, 61, 10)},
            "saved": 60,
            "state": ["best", "model", "optimizer", "ranks"],
        },
        {
            "it failed": {"codes": [1, 0]},
            "no rows": {"losses": {}},
            "does not learn": {"losses": {str(step): 1.0 for step in range(10, 61, 10)}},
            "an older checkpoint": {"saved": 30},
            "no optimizer in it": {"state": ["model"]},
        },
    ),
    **{f"verdict {one}": bound(one) for one in ("input", "launch_overhead", "compute")},
    "gpu tests collected": (
        {"files": list("abcde"), "collected": list("abcde"), "errors": [], "because": []},
        {
            "one can't be": {"collected": list("abcd")},
            "an error": {"errors": ["e"]},
            "no file is marked": {"files": [], "collected": []},
        },
    ),
    **{f"pytest {file}": tested() for file in gputests.files()},
}


def turns(*titles: str) -> Case:
    loops = {title: {"ms": [30.0, 29.0, 31.0], "beside": [1.0, 0.99, 1.01], "per_s": 4e5} for title in titles}
    slow = {**loops, "trainer": {"ms": [40.0, 39.0, 41.0], "beside": [0.75, 0.74, 0.76], "per_s": 3e5}}
    good: dict[str, Any] = {"asked": list(titles), "gpus": 1, "loops": loops}
    broken: dict[str, dict[str, Any]] = {
        "one was not measured": {"loops": dict(list(loops.items())[:-1])},
        "no speed": {"loops": {**loops, titles[-1]: {**loops[titles[-1]], "per_s": 0.0}}},
    }
    return good, broken | ({"far slower than the plain loop": {"loops": slow}} if "HF accelerate" in titles else {})


def rate(**more: Any) -> Case:
    good = {"per_s": 4e5, "ms": [30.0, 29.0, 31.0], "mfu": 0.4, "memory_gb": 20.0, "choices": {}, "reasons": {}, **more}
    failed = {"choices": {"compile": "false"}, "reasons": {"compile": "it failed: BackendCompilerFailed"}}
    return good, {"no speed": {"per_s": 0.0}, "an impossible MFU": {"mfu": 1.2}, "not compiled": failed}


def precisions() -> Case:
    kinds = {"fp32": 1e4, "tf32": 3e4, "bf16": 6e4, "fp16": 6e4}
    good: dict[str, Any] = {kind: {"per_s": [value, 1.1 * value]} for kind, value in kinds.items()} | {"gpus": 1}
    return good, {"no faster": {"bf16": {"per_s": [1.1e4, 1.1e4]}}, "no speed": {"tf32": {"per_s": [0.0, 0.0]}}}


def ablation() -> Case:
    good = {
        "per_s": 4e5,
        "beside": 1.1,
        "loss": 3.01,
        "reference": 3.0,
        "first": 10.8,
        "steps": 50,
        "mfu": 0.4,
        "ms": [160.0, 159.0, 162.0],
        "memory_gb": 20.0,
    }
    return good, {
        "learns less": {"loss": 3.2},
        "learns nothing": {"first": 3.0},
        "no number": {"loss": float("nan")},
        "no speed": {"per_s": 0.0},
        "no steps": {"steps": 1},
    }


_auto, _auto_broken = rate(chosen="64", best=["32", 4e5], gpus=1)
_overhead, _overhead_broken = turns("nothing written", "metrics", "metrics, monitor")
_dear = {**_overhead["loops"], "metrics": {"ms": [33.0, 32.0, 34.0], "beside": [0.9, 0.89, 0.91], "per_s": 3.6e5}}

PART_2: dict[str, Case] = {
    "gpt beside a plain loop": turns("plain loop", "trainer", "HF accelerate"),
    "gpt losses": (
        {"losses": LOSSES, "reference": [4.0, 3.51, 3.0, 2.5], "steps": 4},
        {
            "two percent apart": {"losses": [4.0, 3.5, 3.0, 2.55]},
            "no number": {"losses": NAN},
            "a step is missing": {"losses": LOSSES[:3], "reference": LOSSES[:3]},
            "does not learn": {"losses": FLAT, "reference": FLAT},
        },
    ),
    **{f"gpt micro-batch {micro}": rate() for micro in (4, 8, 16, 64)},
    "gpt micro-batch 32": (rate()[0], {**rate()[1], "a low MFU": {"mfu": 0.2}}),
    "gpt 1.3B fsdp": (
        rate(choices={"parallel": "fsdp"})[0],
        {"no speed": {"per_s": 0.0}, "not sharded": {"choices": {"parallel": "none"}}},
    ),
    "resnet50 JPEGs beside synthetic": ({"JPEGs": 2e3, "synthetic": 2.5e3, "gpus": 1}, {"starved": {"JPEGs": 5e2}}),
    "gpt micro-batch auto": (_auto, {**_auto_broken, "far slower than the best": {"best": ["32", 6e5]}}),
    **{f"precision {model}": precisions() for model in ("gpt", "resnet50", "bert-large")},
    "metrics and monitor": (_overhead, {**_overhead_broken, "a tenth slower": {"loops": _dear}}),
    "checkpoints": (
        {
            "without": [{"mean_s": 0.03}, {"mean_s": 0.03}],
            "with": [{"mean_s": 0.031, "saved": 4, "steps": 295}, {"mean_s": 0.031, "saved": 4, "steps": 295}],
            "gpus": 1,
        },
        {
            "none was written": {"with": [{"mean_s": 0.031, "saved": 0, "steps": 295}]},
            "each stops training": {"with": [{"mean_s": 0.2, "saved": 4, "steps": 295}]},
        },
    ),
    **{name: rate() for name in ("resnet50 synthetic", "resnet50 JPEGs", "resnet50 compiled", "bert-large")},
    "first step": (
        {"seconds": {"cold": 60.0, "warm": 20.0, "from the run folder": 22.0}, "compiled": True},
        {
            "the cache is of no use": {"seconds": {"cold": 60.0, "warm": 61.0, "from the run folder": 22.0}},
            "not measured": {"seconds": {"cold": 60.0}},
            "before it began": {"seconds": {"cold": 60.0, "warm": -3.0, "from the run folder": 22.0}},
        },
    ),
    "small gpt": turns("plain loop", "trainer, not compiled"),
    "cost of a step": (
        {
            "asked": ["plain loop", "trainer"],
            "us": {"plain loop": 900.0, "trainer": 950.0},
            "beyond_us": {"trainer": [50.0, 40.0, 60.0]},
        },
        {
            "one was not measured": {"us": {"plain loop": 900.0}},
            "no time": {"us": {"plain loop": 900.0, "trainer": 0.0}},
        },
    ),
}

PART_3: dict[str, Case] = {
    **{f"ablation {variant.name}": ablation() for variant in variants()},
    "ablation the best together": ablation(),
}

CASES: dict[str, Case] = {
    f"{part} {name}": case for part, cases in ((1, PART_1), (2, PART_2), (3, PART_3)) for name, case in cases.items()
}

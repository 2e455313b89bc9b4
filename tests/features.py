"""What the trainer can do, and where it was run: the table in docs/train.md, made from the tests.

A GPU test that passes is noted in benchmarks/results/ran-on.json when LAUNCH_RAN_ON names that file:
`LAUNCH_RAN_ON=benchmarks/results/ran-on.json pytest -m gpu`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from tests.command import ROOT

PAGE = ROOT / "docs" / "train.md"
RAN = ROOT / "benchmarks" / "results" / "ran-on.json"
TABLE = re.compile(r"(<!-- run on -->\n).*(<!-- end of run on -->)", re.DOTALL)


class Feature(NamedTuple):
    """A technique, how it is asked for, the tests that run it on CPUs, and those that run it on a GPU. Tests are
    FILE::FUNCTION below tests/train."""

    name: str
    setting: str
    cpu: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    faked: bool = False
    """On CPUs its GPU, or what the GPU says, is played."""


FEATURES: tuple[Feature, ...] = (
    Feature(
        "DDP (gloo; NCCL on GPUs)",
        "`parallel: ddp`",
        ("trainer/test_determinism.py::test_the_same_seed_and_ranks_give_the_same_bits",),
        ("test_gpu.py::test_two_gpus_learn_as_one_does",),
    ),
    Feature(
        "FSDP2",
        "`parallel: fsdp`",
        (
            "performance/test_fsdp.py::test_it_is_ddp_within_rounding",
            "performance/test_fsdp.py::test_what_is_read_is_what_was_saved",
        ),
        ("performance/test_fsdp.py::test_on_a_gpu_a_model_comes_from_the_host_and_no_step_waits",),
    ),
    Feature(
        "bf16, fp16, TF32 by the device",
        "`precision: auto`",
        ("performance/test_precision.py::test_auto_goes_by_the_device",),
        ("test_gpu.py::test_each_kind_of_numbers_learns_alike", "test_gpu.py::test_fp16_finds_its_scale"),
        faked=True,
    ),
    Feature(
        "fp16 with gradient scaling",
        "`precision: fp16`",
        ("trainer/test_steps.py::test_a_step_whose_gradients_overflow_is_skipped",),
        ("test_gpu.py::test_fp16_finds_its_scale",),
        faked=True,
    ),
    Feature(
        "attention kernels",
        "`attention`",
        ("performance/test_attention.py::test_a_run_says_what_it_was_told_and_learns_alike",),
        ("test_gpu.py::test_each_kernel_for_attention_learns_alike",),
    ),
    Feature(
        "torch.compile, regional and whole",
        "`compile`",
        (
            "performance/test_compile.py::test_compiled_or_not_the_losses_are_the_same",
            "performance/test_compile.py::test_a_model_that_cannot_be_compiled_trains_without",
        ),
        ("test_gpu.py::test_compiled_or_not_it_learns_alike",),
    ),
    Feature("CUDA graphs", "`cuda_graphs`", gpu=("test_gpu.py::test_cuda_graphs_learn_alike",)),
    Feature(
        "compiled code kept in the run folder",
        "`compile`",
        ("performance/test_compile.py::test_another_start_compiles_nothing_again",),
    ),
    Feature(
        "activation checkpointing",
        "`activation_checkpointing`",
        ("performance/test_prepare_model.py::test_checkpoints_of_activations_save_memory_and_change_no_bit",),
        ("test_gpu.py::test_blocks_that_keep_less_take_less_memory",),
    ),
    Feature(
        "channels-last memory format",
        "`channels_last`",
        ("performance/test_prepare_model.py::test_pixels_lie_together_where_it_pays",),
        ("test_gpu.py::test_pixels_together_learn_alike",),
    ),
    Feature(
        "automatic micro-batch size",
        "`micro_batch_size: auto`",
        ("performance/test_micro_batch.py::test_a_probe_before_training_leaves_no_trace",),
        ("test_gpu.py::test_the_largest_micro_batch_that_fits",),
        faked=True,
    ),
    Feature(
        "smaller micro-batch after running out of memory",
        "always",
        ("performance/test_micro_batch.py::test_two_ranks_of_which_one_runs_out_of_memory_go_on",),
        ("test_gpu.py::test_less_at_a_time_where_the_memory_runs_out_later",),
        faked=True,
    ),
    Feature(
        "skipping non-finite steps",
        "`non_finite`",
        ("performance/test_grad_guard.py::test_a_skipped_step_is_told_with_its_samples",),
    ),
    Feature(
        "hang detection",
        "`hang_after`",
        ("node/test_hang_detection.py::test_the_trainer_hangs_in_a_step_and_goes_on_from_its_checkpoint",),
    ),
    Feature("loader processes", "`loader`", ("data/test_loader.py::test_any_number_of_processes_makes_the_same",)),
    Feature("images: folders and shards", "`data`", ("data/test_images.py::test_shards_hold_the_same_as_their_files",)),
    Feature("tokenizers", "`data: {tokenizer: …}`", ("data/test_text.py::test_a_run_with_a_tokenizer",)),
    Feature(
        "transformers models",
        "`model: hf:…`",
        ("models/test_hugging_face.py::test_each_is_built_from_its_settings_and_learns",),
    ),
    Feature(
        "custom models",
        "`model: my_pkg.model:build`",
        ("models/test_user_model.py::test_it_learns_the_same_on_one_rank_and_on_two",),
    ),
    Feature(
        "custom scripts", "`run.script`", ("script_api/test_session.py::test_a_preempted_script_comes_to_the_same",)
    ),
    Feature(
        "GPU monitor (NVML)",
        "`monitor`",
        ("monitoring/test_nvml.py::test_a_look_at_two_gpus",),
        (
            "monitoring/test_nvml.py::test_the_gpus_of_this_machine",
            "monitoring/test_monitor.py::test_the_gpus_of_this_machine_are_looked_at",
        ),
        faked=True,
    ),
    Feature(
        "GPU health check before a start",
        "always",
        ("node/test_health_check.py::test_a_good_machine_of_eight",),
        faked=True,
    ),
    Feature(
        "samples of evaluations",
        "`eval: {samples: N}`",
        ("trainer/test_samples.py::test_losses_are_the_same_bits_with_and_without",),
    ),
    Feature(
        "profile and verdict",
        "`profile`",
        ("profiling/test_advice.py::test_the_bottleneck_is_found",),
        ("profiling/test_advice.py::test_on_a_gpu",),
    ),
    Feature(
        "bench",
        "`launch bench`, `run.preflight: bench`",
        ("bench/test_suite.py::test_alone",),
        ("bench/test_suite.py::test_on_a_gpu",),
    ),
    Feature(
        "MFU",
        "always",
        ("trainer/test_steps.py::test_mfu_and_rates_by_hand",),
        ("test_gpu.py::test_mfu_is_a_part_of_the_peak",),
        faked=True,
    ),
)
"""What has no test of its own on a GPU counts as never run there. A Mac's GPU has none at all."""


def renewed(text: str, ran: Mapping[str, Any] | None = None) -> str:
    """The page with its table as the tests have it now."""
    noted = json.loads(RAN.read_text()) if ran is None and RAN.is_file() else ran or {}
    rows = "\n".join(f"| {one.name} | {one.setting} | {where(one, noted)} |" for one in FEATURES)
    head = "| technique | setting | run on |\n|---|---|---|"
    return TABLE.sub(lambda match: f"{match[1]}{head}\n{rows}\n{match[2]}", text)


def where(feature: Feature, ran: Mapping[str, Any]) -> str:
    """`CPU; NVIDIA H200, 2026-11-21`, or `CPU; on a GPU never`."""
    devices = sorted({f"{ran[test]['device']}, {ran[test]['date']}" for test in feature.gpu if test in ran})
    gpu = "; ".join(devices) if devices and all(test in ran for test in feature.gpu) else "on a GPU never"
    return f"{'fakes' if feature.faked else 'CPU'}; {gpu}" if feature.cpu else gpu


@cache
def functions(file: str) -> Mapping[str, bool]:
    """The tests of a file below tests/train, and whether each is a GPU's."""
    tree = ast.parse((ROOT / "tests" / "train" / file).read_text())
    tests = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))
    whole = any("mark.gpu" in text for one in tree.body if (text := ast.unparse(one)).startswith("pytestmark ="))
    return {one.name: whole or any("mark.gpu" in ast.unparse(mark) for mark in one.decorator_list) for one in tests}

"""Part 1: check every feature: each technique once, then the GPU tests by file."""

from __future__ import annotations

from typing import Final

from benchmarks.gpu_acceptance import gputests, hardware, runs, techniques
from benchmarks.gpu_acceptance.tasks import Task

_ORDER: Final = (
    *("facts", "imports", "health", "nvml", "fp32", "bf16", "tf32", "fp16"),
    *("attention flash", "attention efficient", "attention cudnn", "attention math"),
    *("activation checkpointing selective", "activation checkpointing full", "fsdp on one GPU"),
    *("killed and resumed", "two ranks on one GPU, gloo", "two ranks on one GPU, NCCL", "cuda graphs out of memory"),
    *(
        "compiled, killed and resumed",
        "memory probe",
        "out of memory",
        "nccl",
        "resume",
        "compile regional",
        "compile whole",
        "cuda graphs",
    ),
    *("ddp", "script", "checkpoint beside training", "verdict input", "verdict launch_overhead", "verdict compute"),
    *("bench", "gpu tests collected", "pytest tests/train/test_gpu.py"),
)


def _ordered() -> tuple[Task, ...]:
    everything = (*hardware.TASKS, *techniques.TASKS, *runs.TASKS, gputests.COLLECTED, *gputests.TASKS)
    by_name = {task.name: task for task in everything}
    return (*(by_name.pop(name) for name in _ORDER), *by_name.values())


TASKS: Final = _ordered()

"""The built-in trainer beside a loop that was written by hand and does nothing but train, and beside its peers.

    python -m benchmarks.training [--runs 15] [--steps 40] [--peers] [--start] [--gpu] [--write]

Every loop has the same model, optimizer and data, and is in processes of its own; they take turns of `--steps` steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import described
from benchmarks.turns import ROOT, Loop, Measured, measure

RESULTS = Path(__file__).with_name("results")
STEPS = 1_000_000
"""No loop comes to its end while it is measured."""

NANOGPT = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
JOB: Mapping[str, Any] = {
    "steps": STEPS,
    "batch_size": 12,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "grad_clip": 1.0,
    "seed": 1337,
    "shape": NANOGPT,
}


def config(told: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A job in the trainer's words."""
    optimizer = {key: told[key] for key in ("lr", "min_lr", "warmup_steps", "weight_decay", "grad_clip")}
    own = {"model": {"name": "gpt", **told["shape"]}, "data": told["text"], "optimizer": optimizer}
    rest = {key: told[key] for key in ("steps", "batch_size", "seed")}
    return {**own, **rest, "eval": {"every": 0}, **more}


@contextmanager
def text() -> Iterator[Path]:
    """Two megabytes of Python's standard library."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        path.write_bytes(b"".join(file.read_bytes() for file in files)[: 2 << 20])
        yield path


# --- Steps -----------------------------------------------------------------------------------------------------------


def loops(told: Mapping[str, Any], ranks: int, *, peers: bool) -> list[Loop]:
    """The plain loop comes first: the others are measured against it."""
    off = {"checkpoint": "off"}
    found = [
        Loop("plain loop", "plain", told, ranks),
        Loop("trainer", "trainer", {"writes": True, "config": config(told)}, ranks),
        Loop("trainer, no checkpoints", "trainer", {"writes": True, "config": config(told, **off)}, ranks),
        Loop("trainer, writes nothing", "trainer", {"writes": False, "config": config(told, monitor=0)}, ranks),
    ]
    others = [Loop("HF accelerate", "accelerate", told, ranks), Loop("Lightning Fabric", "fabric", told, ranks)]
    return found + (others if peers else [])


def steps_table(measured: Sequence[Measured], tokens: int, title: str) -> list[str]:
    """Markdown: the speed of each loop, and beside the plain one."""
    plain = measured[0]
    rows = [f"| {title} | ms a step | tokens/s | × plain loop | CPU ms a step |", "|---|---:|---:|---:|---:|"]
    for one in measured:
        cpu = 1000 * median(one.cpu)
        speed = f"{1000 * one.seconds:.2f} | {tokens / one.seconds:,.0f} | {one.ratio(plain):.3f} | {cpu:.2f}"
        rows.append(f"| {one.loop.title} | {speed} |")
    return [*rows, ""]


def on_cpu(told: Mapping[str, Any], ranks: int, options: argparse.Namespace) -> list[str]:
    found = measure(loops(told, ranks, peers=options.peers), turns=options.runs, steps=options.steps, warm_up=30)
    title = "one process" if ranks == 1 else f"gloo, DDP × {ranks}"
    return steps_table(found, told["batch_size"] * told["shape"]["block_size"], title)


# --- Start-up --------------------------------------------------------------------------------------------------------

EMPTY = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""
PLAIN = """
import json, os, sys
from benchmarks import loops, plain_loop
loops.plain({**json.loads(os.environ["BENCHMARK_JOB"]), "steps": 1})
"""
TRAINER = """
import sys
from train import loop
real = loop.boundary
def boundary(run, told):
    real(run, told)
    if run.ranks.rank == 0:
        print("first step", flush=True)
    import os, time
    time.sleep(1)
    os._exit(0)
loop.boundary = boundary
from train.__main__ import main
main()
"""
DONE = """
import torch.distributed as dist, os, time
if dist.get_rank() == 0:
    print("first step", flush=True)
time.sleep(1)
os._exit(0)
"""


def start(told: Mapping[str, Any], runs: int) -> list[str]:
    """Seconds from torchrun to the end of the first step on two ranks, beside a script that only joins."""
    import json

    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCHMARK_JOB": json.dumps(told)}
    env["LAUNCH_CONFIG"] = json.dumps(config(told, steps=1000))
    scripts = {"a script that only joins": EMPTY + DONE, "plain loop": PLAIN + DONE, "trainer": TRAINER}
    with tempfile.TemporaryDirectory() as folder:
        paths = {title: Path(folder) / f"{number}.py" for number, title in enumerate(scripts)}
        for title, path in paths.items():
            path.write_text(scripts[title])
        rounds = []
        for number in range(runs + 1):
            env["LAUNCH_RUN_FOLDER"] = f"{folder}/run-{number}"
            rounds.append([_until_first_step(path, env) for path in paths.values()])
    columns = list(zip(*rounds[1:], strict=True))
    rows = ["| torchrun × 2, start to the first step | s | × joining alone |", "|---|---:|---:|"]
    for title, times in zip(scripts, columns, strict=True):
        ratio = median(a / b for a, b in zip(times, columns[0], strict=True))
        rows.append(f"| {title} | {median(times):.2f} | {ratio:.2f} |")
    return [*rows, ""]


def _until_first_step(script: Path, env: Mapping[str, str]) -> float:
    """Raises RuntimeError if it doesn't come to one."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    began = time.perf_counter()
    with subprocess.Popen(torchrun, env=dict(env), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line == "first step\n":
                took = time.perf_counter() - began
                process.wait()
                return took
    raise RuntimeError(f"{script.read_text()}\ndid not come to a first step")


# --- On a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(options: argparse.Namespace) -> list[str]:
    """GPT-2 124M in bf16, compiled, beside the plain loop; ResNet-50; bf16 beside fp32; CUDA graphs."""
    with text() as path:
        gpt = {**JOB, "text": str(path), "batch_size": 32, "compile": True, "precision": "bf16"}
        gpt["shape"] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
        found = measure(
            [
                Loop("plain loop, compiled", "plain", gpt),
                Loop("trainer", "trainer", {"writes": True, "config": config(gpt, precision="bf16")}),
            ],
            turns=options.runs,
            steps=options.steps,
            warm_up=20,
        )
        tokens = gpt["batch_size"] * 1024
        lines = steps_table(found, tokens, "GPT-2 124M, T = 1024, bf16")
        flops = 6 * 124_439_808 + 12 * 12 * 768 * 1024  # nanoGPT's estimate_mfu; positions are not counted there
        lines += [f"{tokens * flops / one.seconds / 1e12:.0f} TFLOP/s: {one.loop.title}\n" for one in found]
        small = {**JOB, "text": str(path)}
        lines += _pair(options, "a small GPT", "CUDA graphs", "without", small, {"cuda_graphs": True}, {})
    image = {"model": "resnet50", "data": "synthetic", "steps": STEPS, "batch_size": 256, "eval": {"every": 0}}
    return lines + _pair(options, "ResNet-50, synthetic", "bf16", "fp32", image, {}, {"precision": "fp32"})


def _pair(
    options: argparse.Namespace,
    title: str,
    first: str,
    second: str,
    told: Mapping[str, Any],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> list[str]:
    """The trainer with two configs: how much faster the first is."""
    base = config(told) if "shape" in told else dict(told)
    pair = [
        Loop(name, "trainer", {"writes": True, "config": {**base, **more}})
        for name, more in ((first, ours), (second, theirs))
    ]
    one, other = measure(pair, turns=options.runs, steps=options.steps, warm_up=20)
    rate = told["batch_size"] / one.seconds
    return [
        f"{title}: {first} {1000 * one.seconds:.2f} ms a step ({rate:,.0f} samples/s), "
        f"{second} {1000 * other.seconds:.2f} ms: {one.ratio(other):.2f} ×",
        "",
    ]


# --- All -------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print, and with --write keep the tables under benchmarks/results/."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=40, help="steps of a turn")
    parser.add_argument("--peers", action="store_true", help="HF accelerate and Lightning Fabric too")
    parser.add_argument("--start", action="store_true", help="from torchrun to the first step, too")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPU, and nothing else")
    parser.add_argument("--write", action="store_true", help="keep the tables under benchmarks/results/")
    options = parser.parse_args()
    lines = on_gpu(options) if options.gpu else _on_cpu(options)
    today = datetime.now(UTC).date().isoformat()
    packages = ("torch", *(("accelerate", "lightning-fabric") if options.peers else ()))
    head = f"# Training, {today}\n\n{options.runs} turns of {options.steps} steps. {described(*packages)}.\n"
    written = "\n".join((head, *lines))
    print(written)
    if options.write:
        name = f"training-gpu-{today}.md" if options.gpu else f"training-{today}.md"
        (RESULTS / name).write_text(written, encoding="utf-8")


def _on_cpu(options: argparse.Namespace) -> list[str]:
    with text() as path:
        told = {**JOB, "text": str(path)}
        lines = [*on_cpu(told, 1, options), *on_cpu(told, 2, options)]
        return lines + (start(told, max(3, options.runs // 3)) if options.start else [])


if __name__ == "__main__":
    main()

"""Part 1: check complete runs through the node and torchrun: preempted and resumed, custom scripts, profiled runs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.gpu_acceptance.running import PRINTED, last, program, torchrun
from benchmarks.gpu_acceptance.small import TINY_GPT, all_of, check, config, read, trained, typical
from benchmarks.gpu_acceptance.tasks import ROOT, Measured, Place, SkipRow, Task, Verdict

PREEMPTED: Final = 75
"""Exit code of a run that was preempted after a save (launch_train.common.contract.Exit)."""


class Node:
    """`python -m launch_train.node` with a run of the trainer; its output goes to a file."""

    def __init__(
        self, place: Place, name: str, settings: Mapping[str, Any], *argv: str, cwd: Path | None = None
    ) -> None:
        self.log = place.folder / f"{name}-{time.monotonic_ns()}.log"
        self.folder = place.folder / name
        env = {
            **place.env,
            "LAUNCH_RUN": "acceptance",
            "LAUNCH_RUN_FOLDER": str(self.folder),
            "LAUNCH_CONFIG": json.dumps(settings),
            "LAUNCH_PROCESSES": "1",
            "LAUNCH_RESTARTS": "0",
        }
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launch_train.node", *argv],
                cwd=cwd or place.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def preempt_at(self, step: int, seconds: float) -> None:
        """Send SIGTERM once it has printed step `step` or a later one; nothing if it ends before."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            done = [line.split("/")[0].removeprefix("step ") for line in self.text.splitlines() if "step " in line[:5]]
            if any(one.isdecimal() and int(one) >= step for one in done):
                self.process.send_signal(signal.SIGTERM)
                return
            time.sleep(0.01)

    def ended(self, seconds: float) -> int:
        """Wait for its exit; return the exit code. Its output is also the row's. Raises subprocess.TimeoutExpired."""
        try:
            return self.process.wait(timeout=seconds)
        finally:
            print(f"----- {self.log.name}\n{self.text}", flush=True)


# --- Preempted and resumed --------------------------------------------------------------------------------------------


def _resumed(place: Place) -> Measured:
    """Compare a run that is preempted midway and resumed with an uninterrupted one.

    If it ends before the preemption, repeat it with more steps.
    """
    for steps in (60, 600) if place.tiny else (200, 2000):
        found = _preempted(place, steps)
        if found["codes"][0] == PREEMPTED:
            break
    return found


def _preempted(place: Place, steps: int) -> dict[str, Any]:
    shutil.rmtree(place.folder / "run", ignore_errors=True)
    shutil.rmtree(place.folder / "whole", ignore_errors=True)
    settings = resumable(place, steps)
    first = Node(place, "run", settings)
    first.preempt_at(steps // 10, place.within(120))
    codes = [first.ended(place.within(120)), Node(place, "run", settings).ended(place.within(180))]
    ours, theirs = read(place.folder / "run"), trained(place, "whole", **settings)
    return {
        "codes": codes,
        "steps": steps,
        "resumed": ours["resumed"],
        "losses": ours["losses"],
        "reference": theirs["losses"],
        "sha256": [ours["parameters_sha256"], theirs["parameters_sha256"]],
        "said": last(first.text, 3),
    }


def resumable(place: Place, steps: int) -> dict[str, Any]:
    """Return the run's settings.

    On a GPU, the block size is 1024 tokens: with 128, flash attention has one key block and is deterministic by chance.
    """
    longer, size = ({}, 8) if place.tiny else ({"block_size": 1024}, 4)
    model = {**config(place)["model"], **longer, "dropout": 0.1}
    batch = {"batch_size": size, "micro_batch_size": size}
    return config(place, steps=steps, model=model, deterministic=True, log_every=5, **batch)


def judge_resumed(measured: Measured, *, killed: bool = False) -> Verdict:
    """Check all steps, each loss and the parameters to the last bit."""
    expected = [-signal.SIGKILL if killed else PREEMPTED, 0]
    codes, steps, resumed = measured["codes"], measured["steps"], measured["resumed"]
    pairs = list(zip(measured["losses"], measured["reference"], strict=False))
    differ = [number for number, (one, other) in enumerate(pairs, start=1) if one != other]
    return all_of(
        check(codes == expected, f"exit codes {codes}, not {expected}: {measured['said']}"),
        check(len(resumed) == 1 and 0 < resumed[0] < steps, f"resumed from the steps {resumed} of {steps}"),
        check(len(pairs) == steps, f"{len(pairs)} of {steps} steps are in both runs"),
        check(not differ, f"the losses of {len(differ)} steps differ, first in step {differ[:1]}"),
        check(len({*measured["sha256"], ""}) == 2, f"the parameters differ: {measured['sha256']}"),
        Verdict(True, f"resumed from step {resumed} of {steps}: all losses and parameters are the same bits"),
    )


def _killed(place: Place, compiled: bool = False) -> Measured:
    """Kill a run (SIGKILL) after an asynchronous save, resume it, and compare it with an uninterrupted one."""
    steps = 200 if place.tiny else 400
    settings = {**resumable(place, steps), "compile": compiled}
    run = place.folder / "run"
    first = Node(place, "run", {**settings, "checkpoint": {"minutes": 0.002 if place.tiny else 0.02}})
    until = time.monotonic() + place.within(180)
    while (
        first.process.poll() is None and time.monotonic() < until and not [*run.glob("checkpoints/*/*/manifest.json")]
    ):
        time.sleep(0.005)
    first.process.kill()
    codes = [first.ended(place.within(60)), Node(place, "run", settings).ended(place.within(240))]
    ours, theirs = read(run), trained(place, "whole", **settings)
    return {
        "codes": codes,
        "steps": steps,
        "resumed": ours["resumed"],
        "losses": ours["losses"],
        "reference": theirs["losses"],
        "sha256": [ours["parameters_sha256"], theirs["parameters_sha256"]],
        "compile": [ours["choices"].get("compile"), compiled],
        "said": last(first.text, 3),
    }


def judge_killed(measured: Measured) -> Verdict:
    chosen, compiled = measured["compile"]
    found = check(not compiled or chosen in ("regional", "whole"), f"compile is {chosen}: nothing was compiled")
    return all_of(found, judge_resumed(measured, killed=True))


# --- A checkpoint beside training -------------------------------------------------------------------------------------


def _beside(place: Place) -> Measured:
    """Run the same steps with a checkpoint about every second, and without."""
    steps = 80 if place.tiny else 400
    wide = (
        TINY_GPT if place.tiny else {"n_layer": 8, "n_head": 8, "n_embd": 1024, "block_size": 256, "vocab_size": 8192}
    )
    often = {"minutes": 0.002 if place.tiny else 0.03}
    without = trained(place, "without", steps=steps, model=wide)
    found = trained(place, "with", steps=steps, model=wide, checkpoint=often)
    return {
        "gpus": place.gpus,
        "saved": found["events"].count("checkpoint"),
        "typical_s": [typical(without["step_s"]), typical(found["step_s"])],
        "mean_s": [fmean(without["step_s"][5:]), fmean(found["step_s"][5:])],
        "longest_s": [max(without["step_s"][5:]), max(found["step_s"][5:])],
        "losses": found["losses"],
        "reference": without["losses"],
    }


SLOWER: Final = 1.15
"""Largest slowdown of a step in a run that writes checkpoints all the time."""


def judge_beside(measured: Measured) -> Verdict:
    """Check the slowdown; on a busy CPU only that checkpoints were written."""
    (plain, beside), (_, mean), (_, longest) = measured["typical_s"], measured["mean_s"], measured["longest_s"]
    ratio = beside / plain
    return all_of(
        check(measured["saved"] >= 2, f"{measured['saved']} checkpoints were written"),
        check(not measured["gpus"] or ratio <= SLOWER, f"steps take {ratio:.2f} times as long with checkpoints"),
        Verdict(
            True,
            f"{measured['saved']} checkpoints; a step {1e3 * plain:.2f} ms without, {1e3 * beside:.2f} ms with "
            f"(mean {1e3 * mean:.2f}, longest {1e3 * longest:.1f})",
        ),
    )


# --- A custom script --------------------------------------------------------------------------------------------------

SCRIPT: Final = ROOT / "job_specs" / "examples" / "script"


def _script(place: Place) -> Measured:
    """Start the documentation's example twice: the second start finds the work done."""
    from launch_train import checkpoint, runfolder
    from launch_train.common.storage import LocalFolder

    argv = ("--script", "train_own.py", "--", "--steps", "60")
    codes = [Node(place, "script", {}, *argv, cwd=SCRIPT).ended(place.within(120)) for _ in range(2)]
    storage = LocalFolder(place.folder / "script")
    rows = [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]
    steps = {row["step"]: row["loss"] for row in rows if "loss" in row and "event" not in row}
    state = checkpoint.load(str(place.folder / "script"))
    saved = max(
        int(match["step"]) for name in storage.list("checkpoints/") if (match := runfolder.MANIFEST.match(name))
    )
    return {"codes": codes, "losses": steps, "saved": saved, "state": sorted(state)}


def judge_script(measured: Measured) -> Verdict:
    losses = list(measured["losses"].values())
    return all_of(
        check(measured["codes"] == [0, 0], f"exit codes {measured['codes']}"),
        check(len(losses) == 6, f"{len(losses)} of 6 rows are in the metrics"),
        check(bool(losses) and losses[-1] < losses[0], f"the loss did not fall: {losses}"),
        check(measured["saved"] == 60, f"the newest checkpoint is of step {measured['saved']}, not 60"),
        check({"model", "optimizer"} <= set(measured["state"]), f"the checkpoint holds {measured['state']}"),
        Verdict(True, f"loss {losses[:1]} to {losses[-1:]}; the checkpoint of step 60 was read back"),
    )


# --- Verdicts ---------------------------------------------------------------------------------------------------------


def slow_data(split: str, count: int, width: int, seconds: float) -> Any:
    """Return a slow data source, for the run that waits for its data (`run.config.data`)."""
    import torch

    class Slow:
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            time.sleep(seconds)
            tokens = (torch.arange(width + 1) + index) % 64
            return tokens[:-1], tokens[1:]

    return Slow() if split == "train" else None


def _bound(place: Place, bound: str) -> Measured:
    """Profile a run that is built to have one bottleneck."""
    folder = place.folder / bound / "profile"
    profile = {"wait": 6, "warmup": 2, "active": 3}
    found = trained(place, bound, profile=profile, steps=16, loader={"workers": 0}, **_binding(place, bound))
    verdict = json.loads((folder / "verdict.json").read_text())
    return {"expected": bound, **verdict, "choices": found["choices"]}


def _binding(place: Place, bound: str) -> dict[str, Any]:
    small = TINY_GPT
    if bound == "input":
        slow = {"count": 1000, "width": small["block_size"], "seconds": 0.02}
        path = "benchmarks.gpu_acceptance.runs:slow_data"
        return {"model": small, "data": {"path": path, "settings": slow}, "batch_size": 8, "micro_batch_size": 8}
    if bound == "launch_overhead":
        thin = {**small, "n_layer": 12}
        return {"model": thin, "batch_size": 1, "micro_batch_size": 1}
    wide = {"n_layer": 1, "n_head": 2, "n_embd": 256, "block_size": 64, "vocab_size": 64}
    if not place.tiny:
        wide = {"n_layer": 4, "n_head": 32, "n_embd": 4096, "block_size": 1024, "vocab_size": 512}
    return {"model": wide, "batch_size": 8, "micro_batch_size": 8}


def judge_bound(measured: Measured) -> Verdict:
    found, expected, shares = measured["bound"], measured["expected"], measured["shares"]
    share = shares.get(found, 0.0)
    return check(
        found == expected,
        f"the profile says {found} ({share:.0%}), but the run is made to be bound by {expected}",
        f"bound by {found}: {share:.0%} of a step of {1e3 * measured['step_s']:.1f} ms; advice: {measured['advice']}",
    )


# --- torchrun ---------------------------------------------------------------------------------------------------------


def _ddp(place: Place) -> Measured:
    """Compare torchrun with one process per GPU (on a CPU two, over gloo) with a single process."""
    world = place.gpus or 2
    if world == 1:
        raise SkipRow("skipped: one GPU makes no DDP; see two ranks on one GPU")
    settings = config(
        place, deterministic=True, precision="fp32", micro_batch_size=config(place)["batch_size"] // world
    )
    env = {"LAUNCH_CONFIG": json.dumps(settings), "LAUNCH_RUN_FOLDER": str(place.folder / "ddp")}
    program([*torchrun(world), "-m", "launch_train"], place, 240, **env)
    alone = trained(place, "alone", **{**settings, "micro_batch_size": settings["batch_size"]})
    found = read(place.folder / "ddp")
    kept = {name: found[name] for name in ("losses", "backend", "world_size")}
    return {**kept, "reference": alone["losses"], "expected": ["nccl" if place.gpus else "gloo", world]}


def _two_ranks(place: Place, backend: str) -> Measured:
    """Compare two ranks with DDP on one GPU (on a CPU over gloo) with a single process."""
    settings = config(place, deterministic=True, precision="fp32", micro_batch_size=config(place)["batch_size"] // 2)
    env = {"LAUNCH_CONFIG": json.dumps(settings), "LAUNCH_RUN_FOLDER": str(place.folder / "ddp")}
    try:
        program([*torchrun(2), "-m", "benchmarks.gpu_acceptance.one_gpu", backend], place, 240, **env)
    except RuntimeError as error:
        if backend == "nccl" and "Duplicate GPU" in (place.folder / PRINTED).read_text(errors="replace"):
            raise SkipRow("skipped: this NCCL refuses two ranks on one GPU") from error
        raise
    alone = trained(place, "alone", **{**settings, "micro_batch_size": settings["batch_size"]})
    found = read(place.folder / "ddp")
    kept = {name: found[name] for name in ("losses", "world_size")}
    used = "ddp" in found["choices"]
    return {**kept, "backend": backend if used else "no DDP", "reference": alone["losses"], "expected": [backend, 2]}


def judge_ddp(measured: Measured) -> Verdict:
    from benchmarks.gpu_acceptance.small import learns_alike

    joined = [measured["backend"], measured["world_size"]]
    right = check(joined == measured["expected"], f"ran with {joined}, not {measured['expected']}", f"{joined}")
    return all_of(right, learns_alike(measured, 1e-3 if measured["world_size"] == 1 else 0.03))


TASKS: Final = (
    Task(
        *(
            1,
            "killed and resumed",
            "SIGKILL after an asynchronous save, `deterministic: true`, beside an uninterrupted run",
        ),
        *(_killed, judge_killed),
        seconds=60,
        limit=300,
        on_cpu="",
    ),
    Task(
        *(1, "compiled, killed and resumed", "the same, compiled"),
        *(partial(_killed, compiled=True), judge_killed),
        seconds=100,
        limit=400,
    ),
    Task(
        *(1, "two ranks on one GPU, gloo", "DDP beside a single process"),
        *(partial(_two_ranks, backend="gloo"), judge_ddp),
        seconds=35,
        limit=300,
        on_cpu="two processes",
    ),
    Task(
        *(1, "two ranks on one GPU, NCCL", "DDP beside a single process; NCCL_HOSTID differs"),
        *(partial(_two_ranks, backend="nccl"), judge_ddp),
        seconds=35,
        limit=300,
    ),
    Task(
        *(1, "resume", "preempted by SIGTERM and resumed, `deterministic: true`, beside an uninterrupted run"),
        *(_resumed, judge_resumed),
        seconds=45,
        limit=300,
        on_cpu="",
    ),
    Task(
        *(1, "checkpoint beside training", "step time with and without checkpoints", _beside, judge_beside),
        seconds=25,
        limit=180,
        on_cpu="",
        alone=True,
    ),
    Task(
        1,
        "script",
        "a custom script with launch_train.checkpoint and launch_train.metrics",
        _script,
        judge_script,
        25,
        on_cpu="",
    ),
    Task(
        *(1, "ddp", "torchrun on all GPUs beside a single process", _ddp, judge_ddp),
        seconds=30,
        limit=300,
        on_cpu="gloo, two processes",
    ),
    *(
        Task(
            *(1, f"verdict {bound}", f"the profile of a run that is bound by {bound}"),
            *(partial(_bound, bound=bound), judge_bound),
            seconds=20,
            on_cpu=None if bound == "launch_overhead" else "",  # a CPU has no kernels to wait for
            alone=True,
        )
        for bound in ("input", "launch_overhead", "compute")
    ),
)

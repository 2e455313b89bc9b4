"""Part 2: measure the speed: compared with a hand-written loop, by micro-batch and precision, and the overhead."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks import jobs
from benchmarks.gpu_acceptance.running import program
from benchmarks.gpu_acceptance.sizes import FORMULA, Sizes, flops_per_token, peak, pictures, sizes
from benchmarks.gpu_acceptance.small import all_of, apart, check, chosen, trained, typical
from benchmarks.gpu_acceptance.tasks import Measured, Place, SkipRow, Task, Verdict
from benchmarks.gpu_acceptance.techniques import forced_fsdp
from benchmarks.tables import Loop, Step, cost_table, more_wall, speed, steps_table, wall
from benchmarks.turns import Amount, measure

# --- Alternating loops ------------------------------------------------------------------------------------------------


def _job(place: Place, text: Path, **more: Any) -> dict[str, Any]:
    """Return GPT-2 124M as a job of the plain loop: bf16, compiled if the size says so."""
    of = sizes(tiny=place.tiny)
    told = {
        **jobs.JOB,
        "text": str(text),
        "shape": dict(of.gpt),
        "batch_size": of.gpt_batch,
        "lr": 6e-4,
        "min_lr": 6e-5,
    }
    return {**told, "precision": "bf16", "compile": of.compiles, **more}


def _amount(place: Place, steps: int, rounds: int = 2) -> Amount:
    """Return the amount: loops alternate, so that a slow moment affects all of them."""
    return Amount(1, 2, 3, warm_up=2) if place.tiny else Amount(rounds, 4, steps, warm_up=15)


def _turns(place: Place, loops: Sequence[Loop], amount: Amount, step: Step, title: str) -> dict[str, Any]:
    found = measure(loops, amount)
    first = found[0]
    kept = {
        one.loop.title: {
            "ms": [1e3 * value for value in wall(one)],
            "beside": list(speed(one, first)),
            "per_s": step.units / wall(one).middle,
            "mfu": step.flops / wall(one).middle / step.peak if step.flops and step.peak else None,
        }
        for one in found
    }
    asked = [loop.title for loop in loops]
    return {"asked": asked, "loops": kept, "gpus": place.gpus, "table": steps_table(found, title, step)[:-1]}


def _gpt_step(place: Place, batch: int) -> Step:
    shape = sizes(tiny=place.tiny).gpt
    tokens = batch * shape["block_size"]
    return Step(tokens, flops=tokens * flops_per_token(shape), peak=_peak(place))


def _peak(place: Place) -> float | None:
    import torch

    return peak(torch.cuda.get_device_name(place.device)) if place.gpus else None


def _trainer(job: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the same job as the trainer's config; the whole batch at a time, as in the plain loop."""
    own = {"precision": job["precision"], "compile": job["compile"], "micro_batch_size": job["batch_size"]}
    return jobs.config(job, **own, **more)


def _beside_plain(place: Place) -> Measured:
    """Compare the trainer with a minimal loop, and with HF accelerate if it is installed."""
    with jobs.text() as text:
        job = _job(place, text)
        loops = [jobs.plain(job)[0], jobs.trainer("trainer", _trainer(job))]
        if find_spec("accelerate"):
            loops.append(Loop("HF accelerate", "accelerate", job))
        title = f"{sizes(tiny=place.tiny).name}, bf16, batch {job['batch_size']}"
        return _turns(place, loops, _amount(place, 25), _gpt_step(place, job["batch_size"]), title)


def judge_turns(measured: Measured, slowest: float = 0.0) -> Verdict:
    """Check that all loops were measured, and that on a GPU the trainer reaches `slowest` × the first loop's speed."""
    loops, missing = measured["loops"], sorted(set(measured["asked"]) - set(measured["loops"]))
    beside = loops.get("trainer", {}).get("beside", [1.0])[0]
    shown = [f"{name} {one['per_s']:,.0f}/s{_mfu(one)} ({one['beside'][0]:.3f} ×)" for name, one in loops.items()]
    return all_of(
        check(not missing, f"not measured: {', '.join(missing)}"),
        check(all(_positive(one["per_s"]) for one in loops.values()), f"no speed: {shown}"),
        check(not measured["gpus"] or beside >= slowest, f"the trainer has {beside:.3f} × the first loop's speed"),
        Verdict(True, "; ".join(shown)),
    )


def _mfu(one: Mapping[str, Any]) -> str:
    return f", MFU {100 * one['mfu']:.1f} %" if one.get("mfu") else ""


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def _losses(place: Place) -> Measured:
    """Train 200 steps with the same weights and batches."""
    from benchmarks import plain_loop
    from benchmarks.loops import job as as_job

    steps = 12 if place.tiny else 200
    with jobs.text() as text:
        told = _job(place, text, steps=steps, warmup_steps=steps // 10)
        began = time.monotonic()
        theirs = plain_loop.train(as_job(told))
        between = time.monotonic()
        ours = trained(place, "ours", **_trainer(told))["losses"]
    return {
        "losses": ours,
        "reference": theirs,
        "steps": steps,
        "seconds": [between - began, time.monotonic() - between],
    }


def judge_losses(measured: Measured, most: float = 0.01) -> Verdict:
    ours, theirs = measured["losses"], measured["reference"]
    found = apart(ours, theirs)
    return all_of(
        check(len(ours) == measured["steps"], f"{len(ours)} of {measured['steps']} steps"),
        check(found <= most, f"the losses differ by {found:.2%}"),
        check(bool(ours) and ours[-1] < 0.98 * ours[0], f"the loss did not fall: {ours[:1]} to {ours[-1:]}"),
        Verdict(True, f"loss {ours[0]:.3f} to {ours[-1]:.3f}, step by step within {found:.3%}"),
    )


# --- The trainer alone ------------------------------------------------------------------------------------------------


def _rate(found: Measured, units: int, **more: Any) -> dict[str, Any]:
    """Return the speed of a run: the median of its steps, with the fastest and the slowest tenth."""
    late = sorted(found["step_s"][5:] or found["step_s"])
    usual, tenth = median(late), len(late) // 10
    shares = [share for share in found["mfu"][5:] if share]
    return {
        "per_s": units / usual,
        "ms": [1e3 * usual, 1e3 * late[tenth], 1e3 * late[-1 - tenth]],
        "mfu": median(shares) if shares else None,
        "memory_gb": found["memory_gb"],
        "choices": found["choices"],
        "reasons": found["reasons"],
        **more,
    }


def _gpt(place: Place, batch: int, micro: int | str, name: str = "gpt", **more: Any) -> dict[str, Any]:
    of = sizes(tiny=place.tiny)
    settings = {
        "model": {"name": "gpt", **of.gpt},
        "batch_size": batch,
        "micro_batch_size": micro,
        "steps": of.steps,
        "precision": "bf16",
        "compile": of.compiles,
        **more,
    }
    return _rate(trained(place, name, **settings), batch * of.gpt["block_size"])


def _large(place: Place) -> Measured:
    """Train a GPT of 1.3B parameters with FSDP on one rank."""
    of = sizes(tiny=place.tiny)
    settings = {"model": {"name": "gpt", **of.large}, "batch_size": of.large_batch, "micro_batch_size": of.large_batch}
    settings |= {"precision": "bf16", "compile": of.compiles, "parallel": "fsdp", "steps": max(8, of.steps // 2)}
    with forced_fsdp(place):
        return _rate(trained(place, "large", **settings), of.large_batch * of.large["block_size"])


def judge_large(measured: Measured) -> Verdict:
    return all_of(chosen(measured, "parallel", "fsdp"), judge_rate(measured))


def _micro_batch(place: Place, micro: int) -> Measured:
    """Train with one micro-batch per step."""
    from launch_train.common.errors import OutOfMemoryError

    try:
        return _gpt(place, micro, micro)
    except OutOfMemoryError as error:
        return {"fits": False, "said": str(error)}


def judge_rate(measured: Measured) -> Verdict:
    if measured.get("fits") is False:
        return Verdict(True, f"does not fit: {measured['said'][:80]}")
    middle, least, most = measured["ms"]
    held = f", {measured['memory_gb']:.1f} GB" if measured["memory_gb"] else ""
    compiler = measured["reasons"].get("compile", "") if measured["choices"].get("compile") == "false" else ""
    text = f"{measured['per_s']:,.0f}/s{_mfu(measured)}{held}; {middle:.1f} ms a step ({least:.1f} to {most:.1f})"
    return all_of(
        check(_positive(measured["per_s"]), "no speed"),
        check(measured["mfu"] is None or 0 < measured["mfu"] < 1, f"MFU {measured['mfu']} is impossible"),
        check("failed" not in compiler, f"not compiled: {compiler}"),
        Verdict(True, text),
    )


LEAST_MFU: Final = 0.3
"""Of GPT-2 124M with micro-batch 32 in bf16, compiled, on an H100 or H200."""


def judge_mfu(measured: Measured) -> Verdict:
    mfu = measured.get("mfu")
    return all_of(check(mfu is None or mfu >= LEAST_MFU, f"MFU {mfu} is below {LEAST_MFU}"), judge_rate(measured))


def _jpegs_beside_synthetic(place: Place) -> Measured:
    rows = {name: place.known.get(f"resnet50 {name}", {}) for name in ("synthetic", "JPEGs")}
    if not all("per_s" in row for row in rows.values()):
        raise SkipRow("skipped: resnet50 was not measured with both")
    return {name: row["per_s"] for name, row in rows.items()} | {"gpus": place.gpus}


def judge_jpegs(measured: Measured) -> Verdict:
    share = measured["JPEGs"] / measured["synthetic"]
    slow = check(not measured["gpus"] or share > 0.3, f"JPEGs reach only {share:.0%} of synthetic images' speed")
    return all_of(slow, Verdict(True, f"{measured['JPEGs']:,.0f}/s: {share:.0%} of synthetic images' speed"))


def _auto(place: Place) -> Measured:
    """Compare `micro_batch_size: auto` of a large global batch with the best fixed size."""
    of = sizes(tiny=place.tiny)
    found = _gpt(place, of.global_batch, "auto", steps=max(6, of.steps // 4))
    rows = {name: row for name, row in place.known.items() if name.startswith("gpt micro-batch ") and "per_s" in row}
    best = max(rows, key=lambda name: rows[name]["per_s"], default="")
    fixed = [best.removeprefix("gpt micro-batch "), rows[best]["per_s"]] if best else None
    return {**found, "chosen": found["choices"]["micro-batch"], "best": fixed, "gpus": place.gpus}


def judge_auto(measured: Measured) -> Verdict:
    best, rate = measured["best"], judge_rate(measured)
    if best is None:
        return all_of(rate, Verdict(True, f"auto chose {measured['chosen']}; no fixed one was measured"))
    ratio = measured["per_s"] / best[1]
    return all_of(
        check(not measured["gpus"] or ratio > 0.8, f"{ratio:.2f} × the best fixed one ({best[0]})"),
        rate,
        Verdict(True, f"auto chose {measured['chosen']}: {ratio:.3f} × the best fixed one ({best[0]})"),
    )


MODELS: Final = ("gpt", "resnet50", "bert-large")


def _model(of: Sizes, name: str) -> tuple[dict[str, Any], int, int]:
    """Return a model's settings, its batch, and the units (tokens, images) per sample."""
    from launch_train.common.config import parse

    if name == "gpt":
        return {"name": "gpt", **of.gpt}, of.gpt_batch, of.gpt["block_size"]
    if name == "resnet50":
        shape = {"num_classes": of.classes, "image_size": of.image_size, "width": of.width}
        return {"name": "resnet50", **shape}, of.image_batch, 1
    bert = dict(of.bert)
    parsed: Any = parse({"model": bert}).model
    return bert, of.bert_batch, int(parsed.block_size)


def _trained_as(place: Place, name: str, model: str, **more: Any) -> dict[str, Any]:
    of = sizes(tiny=place.tiny)
    shape, batch, units = _model(of, model)
    settings = {"model": shape, "batch_size": batch, "micro_batch_size": batch, "steps": of.steps, "compile": False}
    return _rate(trained(place, name, **{**settings, **more}), batch * units)


def _precisions(place: Place, model: str) -> Measured:
    """Train in each precision in turn, twice, without the compiler."""
    kinds = ("fp32", "tf32", "bf16", "fp16") if place.gpus else ("fp32", "bf16")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for turn in range(1 if place.tiny else 2):
        for kind in kinds:
            steps = 6 if place.tiny else 20
            found[kind].append(_trained_as(place, f"{kind}-{turn}", model, precision=kind, steps=steps))
    return {
        kind: {"per_s": [one["per_s"] for one in runs], "memory_gb": max(one["memory_gb"] for one in runs)}
        for kind, runs in found.items()
    } | {"gpus": place.gpus}


def judge_precisions(measured: Measured) -> Verdict:
    """Check that tensor cores are used: bf16 is faster than fp32."""
    speeds = {kind: median(one["per_s"]) for kind, one in measured.items() if kind != "gpus"}
    times = {kind: value / speeds["fp32"] for kind, value in speeds.items()}
    shown = [f"{kind} {speeds[kind]:,.0f}/s ({times[kind]:.2f} ×)" for kind in speeds]
    return all_of(
        check(all(map(_positive, speeds.values())), f"no speed: {shown}"),
        check(not measured["gpus"] or times["bf16"] > 1.3, f"bf16 is only {times['bf16']:.2f} × fp32"),
        Verdict(True, ", ".join(shown)),
    )


def _images(place: Place, source: str, *, compiled: bool = False) -> Measured:
    of = sizes(tiny=place.tiny)
    settings = {"precision": "bf16", "compile": compiled and of.compiles}
    if source == "synthetic":
        return _trained_as(place, source, "resnet50", **settings)
    with pictures(of) as folder:
        return _trained_as(place, source, "resnet50", data=str(folder), **settings)


def _bert(place: Place) -> Measured:
    return _trained_as(place, "bert", "bert-large", precision="bf16", compile=sizes(tiny=place.tiny).compiles)


# --- Overhead of the trainer ------------------------------------------------------------------------------------------


def _overhead(place: Place) -> Measured:
    """Measure the overhead of metrics and monitor, compared with the trainer without them."""
    with jobs.text() as text:
        job = _job(place, text, batch_size=4)
        nothing = jobs.trainer("nothing written", _trainer(job, monitor=0), writes=False)
        loops = [
            nothing,
            jobs.trainer("metrics", _trainer(job, monitor=0)),
            jobs.trainer("metrics, monitor", _trainer(job)),
        ]
        return _turns(place, loops, _amount(place, 40), _gpt_step(place, 4), "GPT-2 124M, bf16, batch 4")


def judge_overhead(measured: Measured) -> Verdict:
    """Check that the overhead is below 5 % on a GPU (the target is 1 %)."""
    loops = measured["loops"]
    costs = {name: 100 * (1 / one["beside"][0] - 1) for name, one in loops.items()}
    shown = ", ".join(f"{name} {cost:+.2f} %" for name, cost in list(costs.items())[1:])
    return all_of(
        judge_turns(measured),
        check(not measured["gpus"] or all(cost < 5 for cost in costs.values()), f"too much: {shown}"),
        Verdict(True, f"beyond the same without: {shown}"),
    )


def _checkpoints(place: Place) -> Measured:
    """Compare steps with a checkpoint every few seconds with steps without, twice in turn."""
    of = sizes(tiny=place.tiny)
    settings = {"precision": "bf16", "steps": 40 if place.tiny else 300, "compile": of.compiles}
    found: dict[str, list[Any]] = {"without": [], "with": []}
    for turn in range(1 if place.tiny else 2):
        for kind, often in (("without", "off"), ("with", {"minutes": 0.001 if place.tiny else 0.03})):
            run = _saved(place, f"{kind}-{turn}", checkpoint=often, **settings)
            found[kind].append(run)
    return {"without": found["without"], "with": found["with"], "gpus": place.gpus}


def _saved(place: Place, name: str, **more: Any) -> dict[str, Any]:
    """Return total and typical seconds of its steps, and the seconds of its checkpoints."""
    of = sizes(tiny=place.tiny)
    shape, batch, _ = _model(of, "gpt")
    found = trained(place, name, model=shape, batch_size=batch, micro_batch_size=batch, **more)
    shutil.rmtree(place.folder / name, ignore_errors=True)  # 1.5 GB each
    late, saved = found["step_s"][5:], found["events"].count("checkpoint")
    return {"mean_s": fmean(late), "usual_s": typical(found["step_s"]), "steps": len(late), "saved": saved}


def judge_checkpoints(measured: Measured) -> Verdict:
    """Check what one checkpoint adds: under 1 % in a run that saves every 10 minutes."""
    without, saves = fmean(one["mean_s"] for one in measured["without"]), [one["saved"] for one in measured["with"]]
    beside, steps = fmean(one["mean_s"] for one in measured["with"]), measured["with"][0]["steps"]
    each = max(0.0, beside - without) * steps / max(1, fmean(saves))
    share = 100 * each / 600
    return all_of(
        check(min(saves) >= 2, f"{saves} checkpoints were written"),
        check(not measured["gpus"] or share < 1, f"a checkpoint every 10 minutes costs {share:.2f} %"),
        Verdict(True, f"{saves} checkpoints; each adds {each:.2f} s: {share:.3f} % of 10 minutes"),
    )


def _first_step(place: Place) -> Measured:
    """Measure `python -m launch_train` from its start to the first step.

    Three cases: without compiled code, with torch's own cache, and with the cache that an earlier start left in the run
    folder.
    """
    of = sizes(tiny=place.tiny)
    shape, batch, _ = _model(of, "gpt")
    config = {"model": shape, "data": "synthetic", "steps": 3, "batch_size": batch, "micro_batch_size": batch}
    config |= {"precision": "bf16", "compile": of.compiles, "eval": {"every": 0}, "checkpoint": "off"}
    seconds = {}
    for name, cache in (("cold", "one"), ("warm", "one"), ("from the run folder", "two")):
        folder = place.folder / name
        if name == "from the run folder" and (place.folder / "cold" / "compile").is_dir():
            shutil.copytree(place.folder / "cold" / "compile", folder / "compile")
        seconds[name] = _started(place, folder, config, place.folder / f"cache-{cache}")
    return {"seconds": seconds, "compiled": of.compiles}


def _started(place: Place, folder: Path, config: Mapping[str, Any], cache: Path) -> float:
    from launch_train.common.storage import LocalFolder

    env = {"LAUNCH_CONFIG": json.dumps(config), "LAUNCH_RUN_FOLDER": str(folder)}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    began = time.time()
    program([sys.executable, "-m", "launch_train"], place, 300, **env)
    storage = LocalFolder(folder)
    rows = [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]
    return float(next(row["time"] for row in rows if row.get("step") == 1 and "event" not in row)) - began


def judge_first_step(measured: Measured) -> Verdict:
    seconds = measured["seconds"]
    cold, warm = seconds.get("cold", 0.0), seconds.get("warm", 0.0)
    return all_of(
        check(len(seconds) == 3 and all(map(_positive, seconds.values())), f"not all was measured: {seconds}"),
        check(
            not measured["compiled"] or warm < cold, f"the cache saved nothing: {cold:.1f} s cold, {warm:.1f} s warm"
        ),
        Verdict(True, ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())),
    )


def _small(place: Place) -> Measured:
    """Train a GPT so small that the GPU waits for the host: compiled, with CUDA graphs, and neither."""
    with _quick(place, rounds=1) as (job, amount):
        eager, compiled = {**job, "compile": False}, {**job, "compile": not place.tiny}
        loops = [jobs.plain(eager)[0], jobs.trainer("trainer, not compiled", _trainer(eager))]
        if place.gpus:
            loops += [
                jobs.plain(compiled, title="plain loop, compiled")[0],
                jobs.trainer("trainer", _trainer(compiled)),
            ]
            loops += [jobs.trainer("trainer, CUDA graphs", _trainer(compiled, cuda_graphs=True))]
        step = Step(job["batch_size"] * job["shape"]["block_size"])
        return _turns(place, loops, amount, step, "a small GPT, bf16")


@contextmanager
def _quick(place: Place, rounds: int = 2) -> Iterator[tuple[dict[str, Any], Amount]]:
    """Yield a job and an amount for steps of 1 or 2 ms."""
    with jobs.text() as text:
        amount = _amount(place, 200, rounds)
        yield {**jobs.JOB, "text": str(text), "precision": "bf16", "compile": False}, replace(amount, warm_up=30)


def _cost(place: Place) -> Measured:
    """Measure the host's overhead per step, with a model that has hardly any work."""
    with _quick(place) as (job, amount):
        told = {**job, "shape": jobs.HARDLY, "batch_size": 2, "precision": "fp32"}
        quiet = jobs.trainer("trainer, writes nothing", _trainer(told, monitor=0), writes=False)
        loops = [jobs.plain(told)[0], jobs.trainer("trainer", _trainer(told)), *([] if place.tiny else [quiet])]
        found = measure(loops, amount)
    beyond = {one.loop.title: [1e6 * value for value in more_wall(one, found[0])] for one in found[1:]}
    usual = {one.loop.title: 1e6 * wall(one).middle for one in found}
    table = cost_table(found, "a model of hardly any work")[:-1]
    return {"asked": [loop.title for loop in loops], "us": usual, "beyond_us": beyond, "table": table}


def judge_cost(measured: Measured) -> Verdict:
    missing = sorted(set(measured["asked"]) - set(measured["us"]))
    shown = [
        f"{name} {one[0]:+.0f} µs a step ({one[1]:+.0f} to {one[2]:+.0f})"
        for name, one in measured["beyond_us"].items()
    ]
    return all_of(
        check(not missing, f"not measured: {', '.join(missing)}"),
        check(all(map(_positive, measured["us"].values())), f"no time: {measured['us']}"),
        Verdict(True, f"beyond the plain loop: {', '.join(shown)}"),
    )


def _rate_task(name: str, about: str, work: Callable[[Place], Measured], seconds: float) -> Task:
    return Task(2, name, about, work, judge_rate, seconds, 240, on_cpu="tiny", alone=True)


def _micro_task(micro: int) -> Task:
    about = f"GPT-2 124M at 1024 tokens, bf16, compiled. {FORMULA}"
    found = _rate_task(f"gpt micro-batch {micro}", about, partial(_micro_batch, micro=micro), 30)
    return replace(found, judge=judge_mfu) if micro == 32 else found


def _precision_task(model: str) -> Task:
    about = "fp32, TF32, bf16 and fp16 in turn, not compiled"
    return _task(f"precision {model}", about, partial(_precisions, model=model), judge_precisions, 40)


def _task(
    name: str, about: str, work: Callable[[Place], Measured], judge: Callable[[Measured], Verdict], seconds: float
) -> Task:
    return Task(2, name, about, work, judge, seconds, 300, on_cpu="tiny", alone=True)


SIZES: Final = (16, 32, 64)
"""Micro-batches that `auto` is compared with."""

_PEERS: Final = "GPT-2 124M, bf16, compiled: a plain loop, the trainer, HF accelerate"

TASKS: Final = (
    _task("gpt beside a plain loop", _PEERS, _beside_plain, partial(judge_turns, slowest=0.9), 110),
    _task("gpt losses", "200 steps of both, same weights and batches", _losses, judge_losses, 60),
    _micro_task(SIZES[0]),
    _task("first step", "seconds to the first step, compile cache cold and warm", _first_step, judge_first_step, 110),
    *map(_micro_task, SIZES[1:]),
    replace(
        _task("gpt micro-batch auto", "`micro_batch_size: auto` beside the best fixed one", _auto, judge_auto, 45),
        needs=tuple(f"2 gpt micro-batch {micro}" for micro in SIZES),
    ),
    _precision_task("gpt"),
    _task("metrics and monitor", "what they cost in percent", _overhead, judge_overhead, 70),
    _rate_task(
        "resnet50 synthetic", "ResNet-50, bf16, images made on the GPU", partial(_images, source="synthetic"), 25
    ),
    _rate_task("resnet50 JPEGs", "ResNet-50, bf16, JPEGs decoded meanwhile", partial(_images, source="jpegs"), 35),
    replace(
        _rate_task("gpt 1.3B fsdp", "1.3B parameters at 1024 tokens, bf16, compiled, FSDP on one rank", _large, 90),
        judge=judge_large,
    ),
    Task(
        *(2, "resnet50 JPEGs beside synthetic", "the share of the speed that decoding leaves"),
        *(_jpegs_beside_synthetic, judge_jpegs),
        seconds=1,
        on_cpu="tiny",
        needs=("2 resnet50 synthetic", "2 resnet50 JPEGs"),
    ),
    _rate_task("bert-large", "BERT-large at 512 tokens, bf16, compiled", _bert, 50),
    _task("checkpoints", "what they cost in percent", _checkpoints, judge_checkpoints, 60),
    *(_precision_task("resnet50"), _precision_task("bert-large")),
    _task("small gpt", "a GPT that waits for the host: compiled, CUDA graphs", _small, judge_turns, 50),
    _task("cost of a step", "the trainer beyond the plain loop, in µs", _cost, judge_cost, 40),
    _rate_task(
        "resnet50 compiled", "ResNet-50, bf16, compiled whole", partial(_images, source="synthetic", compiled=True), 90
    ),
    *map(_micro_task, (8, 4)),
)
"""All rows, the most valuable first."""

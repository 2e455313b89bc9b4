"""Measure the cost and speed of checkpoints and metrics, compared with simple equivalents.

    python -m benchmarks.checkpoints [save] [overhead] [pause] [resume] [--write]

The bucket is launcher/testing, in a separate process on this machine. The compared variants alternate, so that a slow
moment of the machine affects both; medians are compared.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import described
from benchmarks.result import parser_of, save_result, today

ROOT = Path(__file__).parent.parent
PART, WORKERS = 16 << 20, 8


@contextmanager
def bucket(latency: float = 0.0) -> Iterator[dict[str, str]]:
    """Run a loopback bucket; yield the environment of a process that uses it."""
    command = [sys.executable, "-m", "launcher.testing.googlecloud", "--latency", str(latency)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield {**os.environ, **_environ(server)}
        finally:
            server.terminate()


def _environ(server: subprocess.Popen[str]) -> dict[str, str]:
    found = {}
    for line in server.stdout or ():
        if match := re.match(r"export (\w+)='?([^'\n]*)'?$", line):
            found[match[1]] = match[2]
        elif line.startswith("# listening"):
            return found
    raise RuntimeError("the bucket did not start")


# --- Save and load ---------------------------------------------------------------------------------------------------


def save(gigabytes: float, runs: int) -> list[str]:
    """Measure the bandwidth of a checkpoint to and from the bucket, and of eight threads that copy as many bytes."""
    with bucket() as env:
        os.environ.update({name: value for name, value in env.items() if name.startswith(("CLOUDSDK", "STORAGE"))})
        rounds = [_round(gigabytes, number) for number in range(runs + 1)][1:]
    size = gigabytes * 1e3
    rows = [
        f"| {size:,.0f} MB, {runs} rounds in turns | ours, MB/s | plain, MB/s | ours / plain |",
        "|---|---:|---:|---:|",
    ]
    for what in ("save", "load"):
        ours, plain = (median(size / one[f"{what} {who}"] for one in rounds) for who in ("ours", "plain"))
        ratio = median(one[f"{what} plain"] / one[f"{what} ours"] for one in rounds)
        rows.append(f"| {what} | {ours:,.0f} | {plain:,.0f} | {ratio:.2f} |")
    return [*rows, "", "Plain: google-cloud-storage, 8 threads, objects of 16 MiB, no checksums, from and to memory."]


def _round(gigabytes: float, number: int) -> dict[str, float]:
    import torch

    from launch_train import runfolder
    from launch_train.checkpointing import manifest as manifests
    from launch_train.checkpointing import multipart_writer
    from launch_train.checkpointing.manifest import Manifest
    from launch_train.common.storage import open_storage

    storage = open_storage(f"gs://my-bucket/{number}")
    state = {f"layer{n}": torch.randn(int(gigabytes * 1e9) // 4 // 16) for n in range(16)}
    folder = runfolder.checkpoint_folder(1, "0001-0000")

    def ours() -> None:
        parts = multipart_writer.write_shard(
            storage, folder, 0, {"tensors": state}, deadline=time.monotonic() + 600, cancelled=threading.Event()
        )
        manifests.commit(storage, Manifest(1, "0001-0000", (parts,), {}))

    def back() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            manifest = manifests.read(storage, runfolder.manifest(1, "0001-0000"))
            (path,) = manifests.fetch(storage, manifest, Path(scratch))
            loaded = manifests.load_shard(path)["tensors"]
            assert loaded.keys() == state.keys()

    plain = _Plain(number, int(gigabytes * 1e9))
    times = {"save ours": _seconds(ours), "save plain": _seconds(plain.up)}
    times |= {"load ours": _seconds(back), "load plain": _seconds(plain.down)}
    for name in storage.list():
        storage.delete(name)
    plain.clear()
    return times


class _Plain:
    """Baseline: eight threads with Google's client."""

    def __init__(self, number: int, size: int) -> None:
        from launch_train.common.storage.client import open_storage_client

        self._bucket = open_storage_client().bucket("my-bucket")
        self._data = {f"plain/{number}/{part}": os.urandom(PART) for part in range(-(-size // PART))}

    def up(self) -> None:
        self._all(lambda name: self._bucket.blob(name).upload_from_string(self._data[name], checksum=None))

    def down(self) -> None:
        self._all(lambda name: self._bucket.blob(name).download_as_bytes(checksum=None))

    def clear(self) -> None:
        self._all(lambda name: self._bucket.blob(name).delete())

    def _all(self, work: Callable[[str], object]) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, self._data))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- Training overhead -----------------------------------------------------------------------------------------------

STEPS = """
import json, sys, time
from launch_train.trainer import train as loop
from launch_train.common.config import parse
from launch_train.distributed.process_group import Ranks
import os
real, times = loop.train_step, []
def train_step(run):
    real(run)
    times.append(time.time())
loop.train_step = train_step
loop.train(parse(json.loads(os.environ["LAUNCH_CONFIG"])), Ranks(), os.environ)
print("TIMES", json.dumps(times))
os._exit(0)
"""
CONFIG: dict[str, Any] = {
    "data": "synthetic",
    "eval": {"every": 0},
    "batch_size": 12,
    "log_every": 10,
    "optimizer": {"warmup_steps": 0},
}


def step_times(env: Mapping[str, str], **config: Any) -> list[float]:
    """Run training in a single-threaded process; return the Unix time at the end of each step."""
    own = {"LAUNCH_CONFIG": json.dumps({**CONFIG, **config}), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "train")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env={**env, **own}, capture_output=True, text=True, check=True, cwd=ROOT
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
    times: list[float] = json.loads(line.removeprefix("TIMES "))
    return times


def overhead(steps: int, runs: int) -> list[str]:
    """Measure training with a bucket (100 ms latency, a checkpoint every 30 s, all metrics) and without any output."""
    rates: dict[str, list[float]] = {"bucket": [], "nothing": []}
    with bucket(latency=0.1) as env:
        for number in range(runs):
            folder = {"LAUNCH_RUN_FOLDER": f"gs://my-bucket/overhead/{number}"}
            for name, given, minutes in (("bucket", folder, 0.5), ("nothing", {}, "off")):
                times = step_times({**env, **given}, steps=steps, checkpoint={"minutes": minutes})
                rates[name].append((len(times) - 1) / (times[-1] - times[0]))
    ratios = [one / other for one, other in zip(rates["bucket"], rates["nothing"], strict=True)]
    tokens = CONFIG["batch_size"] * 64
    return [
        f"| {steps} steps, {runs} pairs in turns | tokens/s, median | least to most |",
        "|---|---:|---:|",
        *(
            f"| {name} | {median(of) * tokens:,.0f} | {min(of) * tokens:,.0f} to {max(of) * tokens:,.0f} |"
            for name, of in rates.items()
        ),
        "",
        f"bucket / nothing: median {median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}",
    ]


def pause(steps: int) -> list[str]:
    """Measure the extra time of the step in which a checkpoint's state is copied, and of steps during the upload."""
    model = {"name": "gpt", "n_layer": 6, "n_head": 8, "n_embd": 512, "block_size": 32}
    with bucket() as env:
        url = "gs://my-bucket/pause"
        given = {**env, "LAUNCH_RUN_FOLDER": url}
        times = step_times(given, steps=steps, model=model, checkpoint={"minutes": 0.1})
        with _environment(env):
            saves = _saves(url)
    took = [later - sooner for sooner, later in pairwise(times)]
    usual = median(took)
    # The state is copied right after its step, within the time of the next one: took[0] is that of step 2.
    extra = [took[step - 1] / usual - 1 for step, _ in saves if step < steps]
    return [
        f"| {len(extra)} checkpoints in {steps} steps of {usual:.2f} s (median) | in steps |",
        "|---|---:|",
        f"| the copy (`blocked` in the checkpoint's event), median | {median(b for _, b in saves) / usual:.3f} |",
        f"| the step with the copy and the begin of the writing, beyond a usual one, median | {median(extra):.3f} |",
        f"| the same, most | {max(extra):.3f} |",
        f"| the longest of all steps, beyond a usual one | {max(took) / usual - 1:.3f} |",
    ]


def _saves(url: str) -> list[tuple[int, float]]:
    """Return (step, seconds for which training was blocked) of each checkpoint of a run."""
    from launch_train.common.storage import open_storage
    from launcher.runs.run_folder import read_results

    found = read_results(open_storage(url))
    events = found.events if found else ()
    return [(one["step"], one["blocked"]) for one in events if one["event"] == "checkpoint" and "blocked" in one]


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- Resume ----------------------------------------------------------------------------------------------------------


def resume(runs: int) -> list[str]:
    """Measure the time from process start to the end of the first step, fresh and from a checkpoint."""
    seconds: dict[str, list[float]] = {"fresh": [], "resumed": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(runs + 1):
            env = {**os.environ, "LAUNCH_RUN_FOLDER": f"{scratch}/{number}"}
            began = time.time()
            fresh = step_times(env, steps=5)[0] - began
            for path in Path(scratch, str(number)).glob("checkpoints/*/*/manifest.json"):
                _as_if_more_was_to_do(path)
            began = time.time()
            resumed = step_times(env, steps=10)[0] - began
            if number:
                seconds["fresh"].append(fresh)
                seconds["resumed"].append(resumed)
    ratios = [one / other for one, other in zip(seconds["resumed"], seconds["fresh"], strict=True)]
    return [
        f"| {runs} pairs in turns | process start to the end of the first step, s, median |",
        "|---|---:|",
        *(f"| {name} | {median(of):.2f} |" for name, of in seconds.items()),
        "",
        f"resumed / fresh: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}",
    ]


def _as_if_more_was_to_do(manifest: Path) -> None:
    """Change a checkpoint's config from 5 steps to 10; otherwise the resume is refused."""
    from launch_train.checkpointing import manifest as manifests
    from launch_train.common.storage import LocalFolder

    folder = LocalFolder(manifest.parents[3])
    name = manifest.relative_to(folder.folder).as_posix()
    old = manifests.read(folder, name)
    new = old._replace(about={**old.about, "config": {**old.about["config"], "steps": 10}})
    folder.write(name, manifests.manifest_json(new))


TITLES = {
    "save": "Save and load",
    "overhead": "The cost beside training",
    "pause": "The pause of a save",
    "resume": "Resume",
}


def main() -> None:
    """Measure and print; with --write, save the tables in benchmarks/results/."""
    parser = parser_of("checkpoints", __doc__)
    parser.add_argument("what", nargs="*", help=f"{', '.join(TITLES)}; left out: all")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pause-steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.what) - set(TITLES):
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    tables = {
        "save": lambda: save(options.gigabytes, options.runs),
        "overhead": lambda: overhead(options.steps, options.runs),
        "pause": lambda: pause(options.pause_steps),
        "resume": lambda: resume(options.runs),
    }
    text = f"# Checkpoints, {today()}\n\n{described('torch', 'google-cloud-storage')}.\n"
    for what in options.what or TITLES:
        text += "\n".join(["", f"## {TITLES[what]}", "", *tables[what](), ""])
        print(text, flush=True)
    if options.write:
        save_result("checkpoints", text)


if __name__ == "__main__":
    main()

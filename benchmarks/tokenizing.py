"""Tokens per second of the built-in trainer's tokenizing: on one core and on two, by threads and by processes.

python -m benchmarks.tokenizing [--rounds 5] [--megabytes 24] [--tokenizer tokenizer.json]

The text is the source code of Python's standard library, one file per JSON record. Without --tokenizer, a byte-level
BPE of 16,000 tokens is trained on it. The variants take turns; medians and their ratios are printed. `threads` encodes
in one process, with the tokenizer's own threads; `processes` is what the trainer does with a large text on many cores.

`at most` is what any number of cores would reach: tokens per second of CPU time of the thread that reads the text and
writes the tokens. It hardly depends on what else the machine does, unlike the other columns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

VARIANTS = (("threads", 1), ("threads", 2), ("processes", 2))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--megabytes", type=float, default=24)
    options.add_argument("--tokenizer", type=Path)
    options.add_argument("--variant", nargs=2, help=argparse.SUPPRESS)
    options.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.variant:
        print(json.dumps(measured(asked.variant[0], int(asked.variant[1]), asked.text, asked.tokenizer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder, "text.jsonl"), asked.megabytes * 1e6)
        tokenizer = asked.tokenizer or train_tokenizer(text, Path(folder, "tokenizer.json"))
        rounds = [[measured_alone(*variant, text, tokenizer) for variant in VARIANTS] for _ in range(asked.rounds)]
    report(rounds)


def write_text(path: Path, size: float) -> Path:
    """Write records of Python's source files, again and again until there are `size` bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [file.read_text(errors="replace") for file in files if "site-packages" not in file.parts]
    with path.open("w") as sink:
        while sink.tell() < size:
            for text in texts:
                sink.write(json.dumps({"text": text}) + "\n")
                if sink.tell() >= size:
                    break
    return path


def train_tokenizer(text: Path, path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    with text.open() as lines:
        made.train_from_iterator(
            (json.loads(line)["text"] for line, _ in zip(lines, range(300), strict=False)), trainer
        )
    made.save(str(path))
    return path


class Speed(NamedTuple):
    """Tokens per second, and per second of the first thread's CPU time."""

    tokens: float
    limit: float


def measured_alone(variant: str, cores: int, text: Path, tokenizer: Path) -> Speed:
    """Return the speed of a variant in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.tokenizing", "--variant", variant, str(cores), "--text", str(text)]
    done = subprocess.run([*command, "--tokenizer", str(tokenizer)], check=True, stdout=subprocess.PIPE, text=True)
    return Speed(*json.loads(done.stdout.splitlines()[-1]))


def measured(variant: str, cores: int, text: Path, tokenizer: Path) -> Speed:
    """Tokenize the text on so many cores; imports don't count, the start of processes does."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    from launch_train.data import tokenize
    from launch_train.data.tokenizers import open_tokenizer

    tokenize.SHARED_BYTES, tokenize.SHARED_CORES = (0, 1) if variant == "processes" else (1 << 60, 1)
    opened = open_tokenizer(str(tokenizer))
    opened.encode(["warm-up"] * 10)
    with tempfile.TemporaryDirectory() as cache:
        began, spent = time.perf_counter(), time.thread_time()
        tokens = tokenize.corpus_of_tokens(tokenize.local_files([text]), opened, Path(cache), "text").length
        return Speed(tokens / (time.perf_counter() - began), tokens / (time.thread_time() - spent))


def report(rounds: list[list[Speed]]) -> None:
    alone = [each[0].tokens for each in rounds]
    heads = f"{'tokens/s':>10} {'per core':>10} {'x one core':>11}  {'least to most':<14} {'at most':>10}"
    print(f"{'variant':<10} {'cores':>5} {heads}")
    for at, (variant, cores) in enumerate(VARIANTS):
        speeds, limit = [each[at].tokens for each in rounds], median(each[at].limit for each in rounds)
        ratios = sorted(speed / one for speed, one in zip(speeds, alone, strict=True))
        speed, spread = median(speeds), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        figures = f"{speed:>10,.0f} {speed / cores:>10,.0f} {median(ratios):>11.2f}  {spread:<14} {limit:>10,.0f}"
        print(f"{variant:<10} {cores:>5} {figures}")


if __name__ == "__main__":
    main()

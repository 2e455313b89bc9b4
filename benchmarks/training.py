"""Compare the built-in trainer with a minimal handwritten loop and with other packages.

    python -m benchmarks.training [--rounds 5] [--turns 4] [--steps 10] [--peers] [--start] [--write]

Every loop has the same model, optimizer and data, and its own processes. In each round all loops are restarted, and
alternate in turns of `--steps` steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from benchmarks import jobs
from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from benchmarks.starts import start
from benchmarks.tables import Loop, Step, cost_table, steps_table, wall
from benchmarks.turns import Amount, measure

NOTE = (
    "All loops are restarted in each round; a figure is the median over the rounds, and *least to most* are its "
    "rounds: what *plain loop, again* has there is noise."
)


def loops(fields: jobs.JobFields, ranks: int, *, peers: bool) -> list[Loop]:
    """Return the loops to compare; the plain loop, the baseline, comes first."""
    ours = jobs.trainer("trainer", jobs.config(fields), ranks)
    return [*jobs.plain(fields, ranks), ours, *(jobs.peers(fields, ranks) if peers else [])]


def in_parts(fields: jobs.JobFields, ranks: int) -> list[Loop]:
    """Return the trainer without some of its features."""
    return [
        jobs.trainer("trainer, no monitor", jobs.config(fields, monitor=0), ranks),
        jobs.trainer("trainer, writes nothing", jobs.config(fields, monitor=0), ranks, writes=False),
    ]


def on_cpu(fields: jobs.JobFields, ranks: int, amount: Amount, *, peers: bool) -> list[str]:
    """Measure steps of a real model, and the loops' own overhead."""
    title = "one process" if ranks == 1 else f"gloo, DDP × {ranks}"
    real = measure(loops(fields, ranks, peers=peers), amount)
    hardly = {**fields, "shape": jobs.HARDLY, "batch_size": 2}
    parts = in_parts(hardly, ranks) if ranks == 1 else []
    costs = measure([*loops(hardly, ranks, peers=peers), *parts], tiny(amount))
    step = Step(fields["batch_size"] * fields["shape"]["block_size"])
    return [
        *steps_table(real, title, step),
        *cost_table(costs, f"{title}, a model of hardly any work", wall(real[0]).middle),
    ]


def tiny(amount: Amount) -> Amount:
    """Return an amount for steps of 1 or 2 ms: more of them, in half the rounds, because starts take most time."""
    rounds = (amount.rounds + 1) // 2
    return replace(amount, rounds=rounds, turns=2 * amount.turns, steps=5 * amount.steps)


def cpu_result(options: argparse.Namespace, amount: Amount) -> list[str]:
    with jobs.text() as path:
        fields = {**jobs.JOB, "text": str(path)}
        lines = [line for ranks in (1, 2) for line in on_cpu(fields, ranks, amount, peers=options.peers)]
        return lines + (start(fields, amount.rounds) if options.start else [])


# --- The command -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and print; with --write, save the tables in benchmarks/results/."""
    options = parsed(sys.argv[1:])
    packages = ("torch", *(("accelerate", "lightning-fabric") if options.peers else ()))
    amount = amount_of(options, Amount(rounds=5, turns=4, steps=10))
    conclude("training", amount, described(*packages), partial(cpu_result, options, amount), write=options.write)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("training", __doc__)
    parser.add_argument("--rounds", type=int, help="all loops are restarted in each (5)")
    parser.add_argument("--turns", type=int, help="of each loop in a round (4, of a tiny model 8)")
    parser.add_argument("--steps", type=int, help="of a turn (10, of a tiny model 50)")
    parser.add_argument("--peers", action="store_true", help="HF accelerate and Lightning Fabric too")
    parser.add_argument("--start", action="store_true", help="from torchrun to the first step, too")
    return parser.parse_args(arguments)


def amount_of(options: argparse.Namespace, usual: Amount) -> Amount:
    """Return the command line's values, and `usual` where it has none."""
    said = {name: getattr(options, name) for name in ("rounds", "turns", "steps")}
    return replace(usual, **{name: value for name, value in said.items() if value is not None})


def conclude(name: str, amount: Amount, hardware: str, work: Callable[[], list[str]], *, write: bool) -> None:
    """Do the work, and print its result with date, command, hardware and duration."""
    began = time.monotonic()
    lines = work()
    took = (time.monotonic() - began) / 60
    much = f"{amount.rounds} rounds of {amount.turns} turns of {amount.steps} steps, {took:.1f} minutes"
    command = " ".join(("python -m benchmarks.training", *sys.argv[1:]))
    text = "\n".join((f"# Training, {today()}\n\n`{command}`: {much}. {hardware}.\n\n{NOTE}\n", *lines))
    publish(name, text, write=write)


if __name__ == "__main__":
    main()

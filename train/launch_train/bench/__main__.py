"""Measure this machine: `python -m launch_train.bench`, or `torchrun … -m launch_train.bench` for all of its GPUs at
once."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from launch_train import runfolder
from launch_train.bench import peaks
from launch_train.bench.figures import PARTS
from launch_train.common import contract
from launch_train.common.errors import OutputError, UnfitError, UsageError
from launch_train.common.process_exit import exit_process, run_program

if TYPE_CHECKING:
    from launch_train.bench.verdict import Report
    from launch_train.distributed.process_group import Ranks


class Options(NamedTuple):
    """Command-line options. `json` is a file, or - to print JSON instead of the table."""

    parts: tuple[str, ...] = PARTS
    quick: bool = False
    strict: bool = False
    json: str = ""


def main() -> NoReturn:
    """Run the benchmark. The command line is parsed before torch is imported, which takes seconds."""
    rank = int(os.environ.get("RANK") or 0)
    ranks: Ranks | None = None

    def work() -> NoReturn:
        nonlocal ranks
        options = parse(sys.argv[1:])
        from launch_train.distributed import process_group

        ranks = process_group.join(os.environ)
        bench(options, ranks, os.environ)
        process_group.finish(ranks)

    def should_report(error: BaseException) -> bool:
        if ranks is None:  # all ranks have an invalid command line; torch may fail to import on one
            return rank == 0 or not isinstance(error, UsageError)
        from launch_train.distributed import process_group

        return process_group.should_report(ranks, error)

    exit_process(run_program("launch_train.bench", work, should_report), rank=rank)


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises UsageError, in one line; SystemExit after --help."""
    parser = _Parser(prog="python -m launch_train.bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="half a minute: less of everything")
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)}", default=",".join(PARTS))
    parser.add_argument("--json", metavar="FILE", help="write the figures there too; -: print them", default="")
    parser.add_argument("--strict", action="store_true", help="end with 70 where something is far too slow")
    options = parser.parse_args(argv)
    wanted = {word.strip() for word in options.only.split(",")}
    if unknown := sorted(wanted - set(PARTS)):
        raise UsageError(f"--only {unknown[0]!r}: there are {', '.join(PARTS)}")
    parts = tuple(part for part in PARTS if part in wanted)
    return Options(parts, options.quick, options.strict, options.json)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help shows what there is)")


def bench(options: Options, ranks: Ranks, env: Mapping[str, str]) -> None:
    """Measure, print and write the report.

    Raises on all ranks: UnfitError if --strict finds a fault, OutputError if the report can't be written.
    """
    import torch

    from launch_train.bench.measure import measure_all
    from launch_train.bench.verdict import Report
    from launch_train.distributed.process_group import run_on_rank_0

    def progress(part: str) -> None:
        if ranks.rank == 0:
            print(f"launch_train.bench: {part} …", file=sys.stderr, flush=True)

    if options.json not in ("", "-") and not Path(options.json).parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no folder {Path(options.json).parent}")
    began = time.monotonic()
    measured = measure_all(ranks, options.parts, quick=options.quick, env=env, say=progress)
    requested = peaks.requested(env.get(contract.GPU, ""), measured[0].device)
    seconds = round(time.monotonic() - began, 1)
    report = Report(tuple(measured), requested, options.quick, torch.__version__, round(time.time(), 1), seconds)
    run_on_rank_0(ranks, lambda: publish(options, report, env))


def publish(options: Options, report: Report, env: Mapping[str, str]) -> None:
    """Print and write the report on rank 0; with --strict, raise UnfitError for faults."""
    from launch_train.bench.verdict import table, to_dict

    data = json.dumps(to_dict(report), indent=1) + "\n"
    sys.stdout.write(data if options.json == "-" else "".join(f"{line}\n" for line in table(report)))
    sys.stdout.flush()
    if options.json not in ("", "-"):
        try:
            Path(options.json).write_text(data)
        except OSError as error:
            raise OutputError(f"{options.json}: {error.strerror or error}") from error
    if folder := env.get(contract.RUN_FOLDER):
        from launch_train.common.storage import open_storage

        open_storage(folder).write(runfolder.BENCH, data.encode())
    if options.strict and report.unfit:
        raise UnfitError("; ".join(report.unfit))


if __name__ == "__main__":
    main()

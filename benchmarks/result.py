"""The command line of a benchmark, and its result: a Markdown page that is printed and, with --write, saved."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def parser_of(name: str, doc: str | None) -> ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, which has --write. `doc` is the module's docstring."""
    parser = ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="save the result in benchmarks/results/")
    return parser


def today() -> str:
    """Return the date of a result, in UTC."""
    return datetime.now(UTC).date().isoformat()


def publish(name: str, text: str, *, write: bool) -> None:
    """Print a result; with `write`, save it as benchmarks/results/NAME-DATE.md."""
    print(text, flush=True)
    if write:
        save_result(name, text)


def save_result(name: str, text: str) -> None:
    """Save a result as benchmarks/results/NAME-DATE.md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{today()}.md").write_text(text, encoding="utf-8")

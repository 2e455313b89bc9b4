"""The `launch` command. Each command is one file in `commands/`; only this package prints.

Imports nothing heavy: each command imports what it needs when it runs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from launcher.cli.style import styled
from launcher.cli.ui import streams
from launcher.errors import INTERRUPTED, LaunchError


def main() -> None:
    """Run the command and exit the process: the console script's entry point.

    Skips garbage collection and the interpreter's shutdown, which take a sixth of a dry run's CPU time
    (benchmarks/startup.py). Commands close their files before they return.
    """
    gc.disable()
    os._exit(run_and_flush())


def run_and_flush() -> int:
    """Run the command with UTF-8 streams, flush them, and return the exit code."""
    code = 0
    try:
        streams.prepare_streams()
        code = run()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):  # `launch … | head`: the reader closed the pipe
                stream.flush()
    except LaunchError as error:
        if not code:  # else the command has already printed its error
            show_error(error)
        return code or error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def run(argv: list[str] | None = None) -> int:
    """Run a command line (default: `sys.argv`), print its error if it fails, and return the exit code.

    With `-o json` the error is also printed to stdout, in the command's one JSON document (docs/output.md).
    """
    from launcher.cli.app import app

    words = sys.argv[1:] if argv is None else argv
    try:
        app(argv, prog_name="launch")
    except SystemExit as end:
        code = stop_code(end) or (end.code if isinstance(end.code, int) else int(end.code is not None))
        if code:
            show_exit(words, end, code)
        return code
    except LaunchError as error:
        show_error(error)
        show_failure(words, error.problem, error.hint, error.exit_code, error.data)
        return error.exit_code
    except KeyboardInterrupt as stop:
        show_exit(words, stop, stop_code(stop))
        return stop_code(stop)
    except BrokenPipeError:
        return 0
    except Exception as error:
        problem = f"unexpected error: {type(error).__name__}: {error}"
        if not show_failure(
            words, problem, "This is a bug in launch; stderr has the traceback.", LaunchError.exit_code
        ):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return LaunchError.exit_code
    return 0


def stop_code(end: BaseException | None) -> int:
    """Return 128 plus the number of the signal that stopped the command (SIGINT, or that of `signals.Stopped`), or 0.

    Typer turns either into an exit with 130 and keeps the cause.
    """
    stop = next((cause for cause in exception_chain(end) if isinstance(cause, KeyboardInterrupt)), None)
    return 128 + getattr(stop, "signum", INTERRUPTED - 128) if stop else 0


def exception_chain(end: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, newest first."""
    seen: set[int] = set()  # `raise error from error` makes an endless chain
    while end and id(end) not in seen:
        seen.add(id(end))
        yield end
        end = end.__cause__ or end.__context__


def show_exit(words: Sequence[str], end: BaseException, code: int) -> None:
    """With `-o json`, print the document and the notes of the KeyboardInterrupt that stopped the command."""
    for cause in exception_chain(end):
        if isinstance(cause, KeyboardInterrupt):
            from signal import Signals

            notes = "\n".join(getattr(cause, "__notes__", ()))
            problem = f"interrupted ({Signals(code - 128).name})"
            show_failure(words, problem, notes, code, getattr(cause, "data", None))
            return


def show_failure(words: Sequence[str], problem: str, hint: str, code: int, data: dict[str, Any] | None = None) -> bool:
    """Print the failure as JSON if the command line asks for JSON; return whether it does."""
    from launcher.cli.options import Output
    from launcher.cli.ui.documents import output_of, print_failure

    output = output_of(words)
    print_failure(output, problem, hint, code, data)
    return output is Output.json


MOST_LINES: Final = 40
"""Most lines of an error message, including its hint."""


def show_error(error: LaunchError) -> None:
    """Print the problem and the hint to stderr."""
    from launcher.cli.ui.text import fitted

    hint = first_lines(fitted(error.hint), MOST_LINES // 2) if error.hint else []
    problem = first_lines(fitted(f"error: {error.problem}"), MOST_LINES - len(hint))
    problem[0] = styled("error:", "1;31", sys.stderr) + problem[0].removeprefix("error:")
    print(*problem, *hint, sep="\n", file=sys.stderr)


def first_lines(text: str, most: int) -> list[str]:
    """Return the first `most` lines of a text; the last one counts the lines that were dropped."""
    lines = text.split("\n")
    return lines if len(lines) <= most else [*lines[: most - 1], f"… and {len(lines) - most + 1} more lines"]

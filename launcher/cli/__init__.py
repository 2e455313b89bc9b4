"""The `launch` command. Each command is a file of its own here; nothing below prints.

This file loads nothing heavy: a command's own imports happen when it runs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from launcher.cli.ui import streams
from launcher.errors import INTERRUPTED, LaunchError


def main() -> None:
    """The console script: run the command and end this process.

    It ends at once, without tearing the interpreter down, and nothing is collected before: that is a sixth of a dry
    run's CPU time (benchmarks/startup.py). What must be closed is closed by then.
    """
    gc.disable()
    os._exit(printed())


def printed() -> int:
    """Run the command with streams of launch's own, to the last byte; the exit code is returned."""
    code = 0
    try:
        streams.prepare()
        code = run()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):  # `launch … | head`: the reader has enough
                stream.flush()
    except LaunchError as error:
        if not code:  # else it has failed, and has said so
            show_error(error)
        return code or error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def run(argv: list[str] | None = None) -> int:
    """Run a command line (None: that in `sys.argv`); an error becomes one message, and the exit code is returned.

    With `-o json` the error is on stdout as well, in the command's one JSON document (docs/output.md).
    """
    from launcher.cli.app import app

    words = sys.argv[1:] if argv is None else argv
    try:
        app(argv)
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
    """128 and the number of the signal that stopped the command: Ctrl-C's, or that of `running.Stopped`. 0: none did.

    Typer makes an exit with 130 of either, whose cause it keeps.
    """
    stop = next((one for one in causes(end) if isinstance(one, KeyboardInterrupt)), None)
    return 128 + getattr(stop, "signum", INTERRUPTED - 128) if stop else 0


def causes(end: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it."""
    seen: set[int] = set()  # `raise error from error` makes a chain without an end
    while end and id(end) not in seen:
        seen.add(id(end))
        yield end
        end = end.__cause__ or end.__context__


def show_exit(words: Sequence[str], end: BaseException, code: int) -> None:
    """With `-o json`, print why the command line was refused, or what a command that was interrupted left (the notes
    of its KeyboardInterrupt)."""
    for cause in causes(end):
        if isinstance(cause, KeyboardInterrupt):
            from signal import Signals

            notes = "\n".join(getattr(cause, "__notes__", ()))
            show_failure(words, f"interrupted ({Signals(code - 128).name})", notes, code)
            return
        if (message := getattr(cause, "format_message", None)) is not None:  # Typer's own error; it has printed it
            context = getattr(cause, "ctx", None)
            show_failure(words, message(), f"{context.command_path} --help" if context else "", code)
            return


def show_failure(words: Sequence[str], problem: str, hint: str, code: int, data: dict[str, Any] | None = None) -> bool:
    """Print how the command failed as JSON. Return whether that was asked for."""
    from launcher.cli.options import Output
    from launcher.cli.ui.documents import output_of, print_failure

    output = output_of(words)
    print_failure(output, problem, hint, code, data)
    return output is Output.json


MOST_LINES: Final = 40
"""Lines of an error's message, its hint included."""


def show_error(error: LaunchError) -> None:
    """What is wrong, and what to do next, on stderr."""
    from launcher.cli.ui.plan_page import fitted

    hint = first_lines(fitted(error.hint), MOST_LINES // 2) if error.hint else []
    problem = first_lines(fitted(f"error: {error.problem}"), MOST_LINES - len(hint))
    print(*problem, *hint, sep="\n", file=sys.stderr)


def first_lines(text: str, most: int) -> list[str]:
    """Return a text's lines; of more than `most` the first, and how many more there are."""
    lines = text.split("\n")
    return lines if len(lines) <= most else [*lines[: most - 1], f"… and {len(lines) - most + 1} more lines"]

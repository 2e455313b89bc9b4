"""The `launch` command. Each command is a file of its own here; nothing below prints.

This file loads nothing heavy: a command's own imports happen when it runs.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

from launcher.cli import streams
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
    """Run a command line (None: that in `sys.argv`); an error becomes one message, and the exit code is returned."""
    from launcher.cli.app import app

    try:
        app(argv)
    except SystemExit as end:
        return stop_code(end) or (end.code if isinstance(end.code, int) else int(end.code is not None))
    except LaunchError as error:
        show_error(error)
        return error.exit_code
    except KeyboardInterrupt as stop:
        return stop_code(stop)
    except BrokenPipeError:
        return 0
    return 0


def stop_code(end: BaseException | None) -> int:
    """128 and the number of the signal that stopped the command: Ctrl-C's, or that of `running.Stopped`. 0: none did.

    Typer makes an exit with 130 of either, whose cause it keeps.
    """
    seen: set[int] = set()  # `raise error from error` makes a chain without an end
    while end and not isinstance(end, KeyboardInterrupt) and id(end) not in seen:
        seen.add(id(end))
        end = end.__cause__ or end.__context__
    return 128 + getattr(end, "signum", INTERRUPTED - 128) if isinstance(end, KeyboardInterrupt) else 0


def show_error(error: LaunchError) -> None:
    """What is wrong, and what to do next, on stderr."""
    from launcher.cli.show import fitted

    print(fitted(f"error: {error.problem}"), file=sys.stderr)
    if error.hint:
        print(fitted(error.hint), file=sys.stderr)

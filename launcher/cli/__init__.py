"""The `launch` command. Each command is a file of its own here; nothing below prints.

This file loads nothing heavy: a command's own imports happen when it runs.
"""

from __future__ import annotations

import sys

from launcher.errors import INTERRUPTED, LaunchError


def main() -> None:
    """The console script: run the command, and turn an error into one message and an exit code."""
    from launcher.cli.app import app

    try:
        app()
    except LaunchError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `launch … | head`: the reader has enough
        sys.stderr.close()
        sys.exit(0)


def show_error(error: LaunchError) -> None:
    """What is wrong, and what to do next, on stderr."""
    print(f"error: {error.problem}", file=sys.stderr)
    if error.hint:
        print(error.hint, file=sys.stderr)

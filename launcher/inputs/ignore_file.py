"""Read ignore files (.dockerignore, .gitignore), and report invalid lines."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from launcher.errors import UsageError
from launcher.inputs.content import unreadable

T = TypeVar("T")


def parsed(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    """Parse each line, in the encoding of this machine's file names. Yield nothing if the file does not exist.

    Raises:
        UsageError: the file can't be read, or `parse` rejects a line.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    for number, line in enumerate((os.fsdecode(line.removesuffix(b"\r")) for line in lines), 1):
        try:
            yield parse(line)
        except (ValueError, re.error):  # pathspec's own error is a ValueError
            raise UsageError(
                f"{path}:{number}: {line!r} is not a valid pattern", "Remove the line, or correct it."
            ) from None

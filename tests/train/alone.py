"""Tests in a process of their own."""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Run it in a fork of this process: for what does something to all children of its process."""

    @functools.wraps(test)
    def forked(**fixtures: Any) -> None:
        reading, writing = os.pipe()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # other threads are no use to it
            pid = os.fork()
        if pid:
            os.close(writing)
            with os.fdopen(reading) as pipe:
                wrong = pipe.read()
            status = os.waitpid(pid, 0)[1]
            if wrong or status:
                pytest.fail(wrong or f"ended with wait status {status}", pytrace=False)
            return
        try:
            test(**fixtures)
        except BaseException:  # noqa: BLE001 - the parent tells it
            os.write(writing, traceback.format_exc().encode()[-60_000:])  # what a pipe takes without being read
        finally:
            os._exit(0)

    return forked

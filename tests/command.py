"""`launch` in this process, in a world of its own: what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SPECS = ROOT / "job_specs"

WORLD = {
    "CLOUDSDK_CORE_PROJECT": "my-project",
    "CLOUDSDK_CORE_ACCOUNT": "me@example.com",
    "CLOUDSDK_CONFIG": str(ROOT / "no-such-folder"),
    "XDG_CONFIG_HOME": "/proc/settings",  # nobody can write there: tests that need a home have one of their own
    "XDG_CACHE_HOME": "/proc/cache",
    "NO_GCE_CHECK": "true",  # google-auth would look for a metadata server off this machine
    "no_proxy": "127.0.0.1",  # as in conftest.py
    "PATH": os.environ.get("PATH", ""),
    "HOME": os.environ.get("HOME", "/"),
    "LAUNCH_OFFLINE": "1",  # the prices shipped with launch, whatever the cache has
}
"""All that a command sees: a project, an account, and no gcloud configuration or settings of whoever runs the tests."""


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def shown(self) -> str:
        """Both streams, as a terminal shows them when one follows the other."""
        return self.out + self.err


def launch(*argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Ran:
    """Run `launch ARGV`; `env` replaces the world's variables (an empty value removes one)."""
    from launcher.cli import run

    world = {name: value for name, value in {**WORLD, **(env or {})}.items() if value}
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with as_process(["launch", *map(str, argv)], world, cwd), streams[0], streams[1]:
        code = run()
    return Ran(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def as_process(argv: list[str], env: Mapping[str, str], cwd: Path) -> Iterator[None]:
    """This process with another command line, environment and folder."""
    import sys

    kept_argv, kept_env = sys.argv, dict(os.environ)
    sys.argv = argv
    os.environ.clear()
    os.environ.update({**env, "COLUMNS": "80", "NO_COLOR": "1"})
    try:
        with contextlib.chdir(cwd):
            yield
    finally:
        sys.argv = kept_argv
        os.environ.clear()
        os.environ.update(kept_env)


def steady(text: str) -> str:
    """`text` without what changes with every edit of the image's content: its tag, and the plan's digest."""
    text = re.sub(r"(/(train|dependencies):)[0-9a-f]{16}\b", r"\g<1>0123456789abcdef", text)
    return re.sub(r"(launch-plan\W+)[0-9a-f]{32}\b", rf"\g<1>{'0123456789abcdef' * 2}", text)


def shell(line: str) -> list[str]:
    """The arguments of a recorded `launch …` line."""
    program, *argv = shlex.split(line)
    if program != "launch":
        raise ValueError(f"not a launch command: {line}")
    return argv

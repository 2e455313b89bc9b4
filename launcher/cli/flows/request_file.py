"""A request written by hand, or saved from a dry run: read, checked, and shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.options import Flags, Output
from launcher.errors import UsageError
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.rehearsal.request import Pool

BESIDE = frozenset({"output"})
"""The flags of a job that go with a request; the others would change a spec, and there is none."""


def load(path: Path, spec: Path | None, flags: Flags) -> dict[str, Any]:
    """The request in a file, or the first one of a plan; `--output` moves its run folder.

    Raises:
        UsageError: the file isn't JSON of a CustomJob, or a spec or a flag of one stands beside it.
    """
    from launcher.cli.gather import full_path
    from launcher.rehearsal.request import HINT, parse_request, rebased

    if spec or (extra := of_a_spec(flags)):
        what = f"the spec {spec}" if spec else extra
        raise UsageError(f"--request is run as it stands: {what} can't go with it", "Change the request, or plan anew.")
    try:
        request = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--request {path} can't be read as JSON: {error}") from error
    if not isinstance(request, dict):
        raise UsageError(f"--request {path} isn't a JSON object", HINT)
    match request:
        case {"attempts": [{"request": dict(first)}, *_]}:  # a whole plan, as -o json prints it
            request = first
    parse_request(request)
    return rebased(request, full_path(flags.output)) if flags.output else request


def of_a_spec(flags: Flags) -> str:
    """The first flag that is given and would change a spec; empty when none is."""
    given = (one.name for one in fields(flags) if getattr(flags, one.name) != one.default and one.name not in BESIDE)
    return next((f"--{name.replace('_', '-')}" for name in given), "")


def folder(code: Path | None) -> Path | None:
    """The folder of `--code`, from the root. Raises UsageError where it is none."""
    if code is None:
        return None
    if not code.is_dir():
        raise UsageError(f"--code {code} isn't a folder", "It plays the part of the image's folder with your code.")
    return code.resolve()


def show(request: dict[str, Any], output: Output, *, docker: bool = False) -> None:
    """Print what would be run, in containers or without."""
    from launcher.cli.ui.plan_page import as_yaml

    if output is Output.json:
        print(json.dumps({"request": request}, indent=2, ensure_ascii=False))
    elif output is Output.yaml:
        print(f"# The CustomJob that is rehearsed.\n{as_yaml(request)}")
    else:
        print("\n".join(page(request, docker)))


def page(request: dict[str, Any], docker: bool) -> Iterator[str]:
    """The request in a few lines of at most 80 columns."""
    from launcher.cli.ui.plan_page import REHEARSED, TARGETS, WIDTH, labelled, wrapped
    from launcher.rehearsal.request import parse_request

    job = parse_request(request)
    yield from wrapped(f"{job.name or 'a request without a name'}  on {TARGETS['local']}", WIDTH)
    yield ""
    for number, pool in enumerate(job.pools):
        yield from labelled(f"pool {number}", pool_text(pool))
    for image in job.images if docker else [REHEARSED]:
        yield from labelled("image", image)
    yield from labelled("output", job.run_folder or "none")
    yield ""
    yield "Nothing was started."


def pool_text(pool: Pool) -> str:
    """`2 replicas, 8 GPUs each: python -m launch_train.node --module train`."""
    count, gpus = pool.replica_count, pool.machine_spec.accelerator_count
    each = f"{plural(gpus, 'GPU')}{' each' if count > 1 else ''}" if gpus else "no GPUs"
    container = pool.container_spec
    runs = shlex.join((*container.command, *container.args)) or "the image's entrypoint"
    return f"{plural(count, 'replica')}, {each}: {runs}"

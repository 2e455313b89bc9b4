"""Read, check and print a request from a file, written by hand or saved from a dry run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.cli.options import Flags, Output
from launcher.errors import UsageError
from launcher.text import plural

WRITE = "A dry run writes one: launch vertex SPEC --dry-run -o json"
ALLOWED = frozenset({"output"})
"""The spec flags that are allowed with a request."""


def load_request(path: Path, spec: Path | None, flags: Flags) -> dict[str, Any]:
    """Return the request in a file, or the first request of a plan; `--output` moves its run folder.

    Raises:
        UsageError: the file is not the JSON of a CustomJob, or a spec or a spec flag is given too.
    """
    from launcher.inputs.gather import full_path
    from launcher.services.local.request import HINT, parse_request, rebased

    extra = [f"the spec {spec}"] if spec else []
    for name, value in flags._asdict().items():
        if value != flags._field_defaults[name] and name not in ALLOWED:
            extra.append(f"--{name.replace('_', '-')}")
    if extra:
        raise UsageError(f"{extra[0]} cannot be combined with --request", "Edit the request instead, or plan a spec.")
    try:
        request = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read --request {path}: {error.strerror}", WRITE) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read --request {path} as JSON: {error}", WRITE) from error
    if not isinstance(request, dict):
        raise UsageError(f"--request {path} is not a JSON object", HINT)
    match request:
        case {"attempts": [{"request": dict(first)}, *_]}:  # a whole plan, as -o json prints it
            request = first
    match request:
        case {"host": str(), "job": dict(job)}:  # for a host
            request = {**job, "labels": request["labels"]}
    parse_request(request)
    return rebased(request, full_path(flags.output)) if flags.output else request


def folder(code: Path | None) -> Path | None:
    """Return the full path of `--code`. Raises UsageError: it is not a folder."""
    if code is None:
        return None
    if not code.is_dir():
        raise UsageError(
            f"--code {code} is not a folder", "--code takes the folder with your code, as the image would contain it."
        )
    return code.resolve()


def show_request(request: dict[str, Any], output: Output, *, docker: bool = False) -> None:
    """Print the request."""
    from launcher.plan.yaml_text import as_yaml

    if output is Output.json:
        print(json.dumps({"request": request}, indent=2, ensure_ascii=False))
    elif output is Output.yaml:
        print(f"# The CustomJob that launch local runs.\n{as_yaml(request)}")
    else:
        print("\n".join(request_lines(request, docker)))


def request_lines(request: dict[str, Any], docker: bool) -> Iterator[str]:
    """Yield a summary of the request, in at most 80 columns."""
    from launcher.cli.ui.plan_page import NO_IMAGE, TARGETS, WIDTH, labelled, wrapped
    from launcher.services.local.request import parse_request

    job = parse_request(request)
    yield from wrapped(f"{job.name or 'a request without a name'}  on {TARGETS['local']}", WIDTH)
    yield ""
    for number, pool in enumerate(job.pools):
        count, gpus = pool.replica_count, pool.machine_spec.accelerator_count
        each = f"{plural(gpus, 'GPU')}{' each' if count > 1 else ''}" if gpus else "no GPUs"
        container = pool.container_spec
        command = shlex.join((*container.command, *container.args)) or "the image's entrypoint"
        yield from labelled(f"pool {number}", f"{plural(count, 'replica')}, {each}: {command}")
    for image in job.images if docker else [NO_IMAGE]:
        yield from labelled("image", image)
    yield from labelled("output", job.run_folder or "none")
    yield ""
    yield "Nothing was started."

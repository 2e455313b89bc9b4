"""JSON and YAML on stdout: one document for each command, also if it fails (docs/output.md)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from launch_train import runfolder
from launcher.cli.options import Output

FORMAT = re.compile(r"-[A-Za-z]*?o(json|yaml|text)?")
"""`-o`, `-ojson`, and `-fo` of `launch logs -fo json`."""


def output_of(argv: Sequence[str]) -> Output:
    """Return the output format that a command line asks for; the command line may be invalid."""
    own = list(argv[: argv.index("--")] if "--" in argv else argv)
    chosen = Output.text
    for word, after in pairwise([*own, ""]):
        if (match := FORMAT.fullmatch(word)) and (match[1] or after) in [*Output]:
            chosen = Output(match[1] or after)
    return chosen


def printed(
    data: Any, output: Output, error: BaseException | None = None, *, page: Iterable[str] | None = None
) -> None:
    """Print a document as JSON or YAML, or in its place the lines of its `page` as text.

    With `error`, which ends the command, the document is printed later with the error.
    """
    from launcher.plan.yaml_text import as_yaml

    if page is not None and output is Output.text:
        print("\n".join(page))
        return
    if error is not None:
        vars(error)["data"] = data
        return
    data = finite(data)
    print(json.dumps(data, indent=2, ensure_ascii=False) if output is Output.json else as_yaml(data))


def finite(data: Any) -> Any:
    """Return a document without numbers that JSON can't hold: one that is nan or infinite becomes null, and
    `nonfinite` of the same object has its text, as in a run's metrics."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, list | tuple):
        return [finite(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    values = {name: finite(value) for name, value in data.items()}
    lost = {name: str(value) for name, value in data.items() if values[name] is None and value is not None}
    return {**values, "nonfinite": {**runfolder.nonfinite(values), **lost}} if lost else values


def print_failure(output: Output, problem: str, hint: str, exit_code: int, data: dict[str, Any] | None = None) -> None:
    """Print how a command failed: in its document, or as one line of JSON."""
    if output is Output.text or (data is None and output is not Output.json):
        return
    error = {"problem": problem, "hint": hint, "exit_code": exit_code}
    with suppress(BrokenPipeError):
        if data is None:
            print(json.dumps({"error": error}, ensure_ascii=False))
        else:
            printed({**data, "error": {**(data.get("error") or {}), **error}}, output)

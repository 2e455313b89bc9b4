"""Functions of the startup script, called one by one in a bash that has read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.command import ROOT
from tests.plan.planning import told

SCRIPT = ROOT / "launcher" / "services" / "compute" / "startup.sh"


def call(state: Path, code: str, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `code`, which sees the script's functions and `words` as its arguments, with `state` for its folder."""
    text = f"source {SCRIPT}; STATE={state} HELPERS={state}/helpers POLL=0.01\n{code}"
    python = state / "bin" / "python3"  # this one, whatever else PATH begins with
    if not python.is_symlink():
        python.parent.mkdir(exist_ok=True)
        python.symlink_to(Path(sys.executable).resolve())
    world = {"PATH": f"{python.parent}:{os.environ['PATH']}", **(env or {})}
    command = ["bash", "-c", text, "test", *words]
    return subprocess.run(command, env=world, capture_output=True, text=True, check=False, timeout=60)


def told_text(request: dict[str, Any]) -> str:
    """The metadata item `launch` of a request, as it stands there."""
    assert told(request)
    items = request.get("instanceProperties", request)["metadata"]["items"]
    return next(str(item["value"]) for item in items if item["key"] == "launch")

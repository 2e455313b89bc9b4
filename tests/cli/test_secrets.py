"""A secret's value is in nothing that launch shows or leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.command import launch

if TYPE_CHECKING:
    from launcher.testing.googlecloud import GoogleCloud

CANARY = "canary-7f3a91c2d4"
CODE = """
import os
print("got", len(os.environ["HF_TOKEN"]), flush=True)
raise RuntimeError("on purpose")
"""


def test_a_local_run_reads_secrets_and_prints_none(tmp_path: Path, cloud: GoogleCloud) -> None:
    cloud.secrets.add("hf", CANARY.encode())
    (tmp_path / "mine.py").write_text(CODE)
    secrets = {"HF_TOKEN": "projects/my-project/secrets/hf/versions/latest"}
    run = {"script": "mine.py", "launcher": "python"}
    spec = {"name": "a", "machine": {"type": "l4"}, "run": run, "secrets": secrets, "limits": {"restarts": 0}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    argv: list[str | Path] = ["local", tmp_path / "job.yaml", "--output", tmp_path / "runs"]
    planned = launch(*argv, "--dry-run", "-o", "json", env=cloud.environ())
    ran = launch(*argv, "-o", "json", env=cloud.environ())
    assert f"got {len(CANARY)}" in ran.err
    assert "RuntimeError: on purpose" in ran.err  # a traceback, which shows no values
    left = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} >= {"attempts", "nodes", "text"}
    everything = planned.shown + ran.shown + "".join(path.read_text(errors="replace") for path in left)
    assert "HF_TOKEN" in everything
    assert CANARY not in everything

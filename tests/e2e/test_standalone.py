"""The loopback cloud on its own, as docs/ci.md starts it: from `launch setup` to a finished job."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command import ROOT, WORLD
from tests.e2e.recipe import cache
from tests.e2e.running import LAUNCH

pytestmark = [pytest.mark.e2e, pytest.mark.slow(turn=3)]

SPEC = """\
name: my-job
machine: {type: l4, gpus: 1}
regions: [us-central1]
provisioning: [standard]
run:
  config:
    model: {name: gpt, n_layer: 1, n_head: 1, n_embd: 16, block_size: 16}
    data: python-stdlib
    steps: 5
    batch_size: 2
    micro_batch_size: 2
limits: {hours: 1}
"""


@contextmanager
def standalone() -> Iterator[dict[str, str]]:
    """The variables that the program prints, while it runs."""
    command = [sys.executable, "-m", "launcher.testing.googlecloud", "--run"]
    with subprocess.Popen(command, cwd=ROOT, env=WORLD, stdout=subprocess.PIPE, text=True) as cloud:
        try:
            variables = {}
            for line in cloud.stdout or ():
                if line.startswith("# listening"):
                    break
                name, _, value = shlex.split(line)[1].partition("=")
                variables[name] = value
            yield variables
        finally:
            cloud.terminate()


def test_a_job_runs_in_a_project_that_setup_has_prepared(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    with standalone() as variables:
        env = {**WORLD, **variables, "XDG_CACHE_HOME": cache(), "DOCKER_CONFIG": "/nonexistent"}
        for arguments in (
            ["setup", "--yes", "--region", "us-central1"],
            ["vertex", "job.yaml", "--yes", "--set", f"image.repository={variables['LAUNCH_REPOSITORY']}"],
        ):
            done = subprocess.run(
                [LAUNCH, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
            )
            assert done.returncode == 0, done.stderr
        assert "succeeded in" in done.stdout + done.stderr

"""A page on one run in three places: `python -m tests.slurm.recipe` records it again (see tests/e2e/recipe.py)."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from launch_train.common.storage import LocalFolder
from launch_train.runfolder.run import read_run
from tests.command import ROOT, WORLD
from tests.e2e.recipe import SPEC, printed, recorded, steps
from tests.e2e.running import LAUNCH
from tests.remote.hosts import a_host
from tests.slurm.cluster import SlurmCluster, a_cluster, until_true

PAGE = ROOT / "docs" / "recipes" / "anywhere.md"


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step of a run."""
    rows = [start.rows for start in read_run(LocalFolder(folder)).starts]
    return {step: loss for each in rows for step, loss in zip(each.steps, each.values.get("loss", ()), strict=False)}


def wait_for_a_step(run: Path, report: str, cluster: SlurmCluster) -> None:
    """Wait until the newest start of a run has written the loss of a step."""
    known = len(losses(run))

    def is_training() -> bool:
        return len(losses(run)) > known

    def report_jobs() -> str:
        jobs = run.parents[1] / "jobs"
        return (
            report
            + cluster.run("squeue", "--states=all")
            + "".join(path.read_text() for path in jobs.glob("*/*") if path.suffix in (".log", ".json"))
        )

    until_true(is_training, report_jobs)


def outputs(text: str, folder: Path) -> list[str]:
    """Run the page's commands in `folder`, with a host and a cluster; each job trains before the next command."""
    (spec,) = SPEC.findall(text)
    project = folder / "project"
    project.mkdir()
    (project / "my_job.yaml").write_text(spec)
    (project / "text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    home, run, shown = folder / "home", "", []
    with (
        pytest.MonkeyPatch.context() as patch,
        a_cluster(folder / "cluster") as cluster,
        a_host(folder, patch, python=sys.executable) as host,
    ):
        python = folder / "programs" / "python3"  # of this machine, whose account has the home folder `home`
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        path = f"{Path(LAUNCH).parent}:{cluster.programs}:{os.environ['PATH']}"
        own = {"HOME": str(home), "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "80", "PATH": path}
        cache = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}  # which has the shared connection
        env = {**WORLD, **own, **cache}
        for line, _ in steps(text):
            shown_text = printed(re.sub(r"my-job-\w{8}", run, line), env, project)
            shown_text = re.sub(r"\w{8}(-\w{4}){3}-\w{12}", "742c1b74-3d85-5e5e-ba10-63b482412764", shown_text)
            shown.append(shown_text.replace(str(folder), "/home/me").replace(str(ROOT), "/home/me/launch"))
            if not run:
                run = next((host.home / "launch" / "runs").iterdir()).name
            if "--detach" in line:
                machine = home if " slurm " in line else host.home
                wait_for_a_step(machine / "launch" / "runs" / run, "".join(shown), cluster)
    return shown


if __name__ == "__main__":
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as scratch:
        shown = outputs(page, Path(scratch))
    run = next(re.finditer(r"my-job-[0-9a-f]{8}", shown[0]))[0]
    PAGE.write_text(re.sub(r"my-job-[0-9a-f]{8}", run, recorded(page, shown)))

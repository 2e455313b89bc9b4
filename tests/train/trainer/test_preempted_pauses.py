"""A preemption while one rank takes far longer than a step: the others wait for it, and the step is saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from launch_train.common.storage import LocalFolder
from tests.command import ROOT
from tests.train.pausing import PHASES
from tests.train.trials import CONFIG, read, selected_cases

CASES = (*product(PHASES, (0, 1)), ("forward", 1, "long"))

Case = tuple[str | int, ...]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Case, tuple[Path, dict[str, Any]]]:
    """By phase, the rank that pauses in it, and whether for long: the run folder, and how the ranks ended. The selected
    cases run side by side."""
    base = tmp_path_factory.mktemp("pauses")
    outs = {case: base / "-".join(map(str, case)) for case in selected_cases(request, "case")}
    jobs = []
    for (phase, rank, *long), out in outs.items():
        out.mkdir()
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(base),
            "PAUSE_IN": str(phase),
            "PAUSE_RANK": str(rank),
            "LONG": "long" if long else "",
            contract.NOTICE: str(out / "notice"),
            contract.RUN_FOLDER: str(out / "run"),
            contract.EXIT_FILE: str(out / "exit"),
            contract.CONFIG: json.dumps({**CONFIG, "monitor": 0}),
        }
        jobs.append(json.dumps({"number": out.name, "out": str(out), "ranks": 2, "env": env}))
    server = [sys.executable, "-m", "tests.train.pausing"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(server, input="\n".join(jobs), env=env, stdout=subprocess.PIPE, text=True, check=True)
    ended = {end["number"]: end for line in done.stdout.splitlines() for end in [json.loads(line)]}
    return {case: (out / "run", ended[out.name]) for case, out in outs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_preemption_in_a_long_phase_saves_and_exits_with_75(
    case: Case, runs: dict[Case, tuple[Path, dict[str, Any]]]
) -> None:
    folder, end = runs[case]
    assert set((folder.parent / "exit").read_text().split()) == {"75"}, "\n".join(end["errors"])
    assert set(end["codes"]) <= {contract.Exit.PREEMPTED, -signal.SIGTERM}  # rank 1 exits last, and is signalled again
    stopped = read(folder).event("preempted")
    assert stopped
    step, _ = PHASES[str(case[0])]
    assert step <= stopped["step"] <= step + 2
    assert any(name.startswith(f"checkpoints/step-{stopped['step']:08d}/") for name in LocalFolder(folder).list())

"""Whatever is wrong with what the trainer is given: one line about it, the right exit code, and no process left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from tests.command import ROOT
from tests.train.material import USUAL, Wrong, material
from tests.train.trials import selected_cases
from tests.train.wrongs import CASES, PAGE, renewed

GONE = 10.0
"""Seconds from the line to the end of the last process."""

LOADED = (
    "launch_train.trainer.train",
    "torch._dynamo",
    "torch.utils.flop_counter",
    "transformers.models.llama.modeling_llama",
)
TERMINATED = (-15, 143)

Ended = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    material(folder)
    return folder


@pytest.fixture(scope="module")
def ended(here: Path, request: pytest.FixtureRequest) -> Ended:
    """How the ranks of each selected case ended, and before that the runs that some need before them."""
    cases = {name: CASES[name] for name in selected_cases(request, "name")}
    clean = {contract.EXIT_FILE: str(here / "done")}
    before = {name: case._replace(env=clean | dict(case.before)) for name, case in cases.items() if case.before}
    if before:
        started(here, before)
    return started(here, cases)


def started(here: Path, cases: dict[str, Wrong]) -> Ended:
    jobs = []
    for name, case in cases.items():
        out = here / f"out-{name}"
        out.mkdir(exist_ok=True)
        env = environment(here, out, case)
        jobs.append(json.dumps({"number": name, "out": str(out), "ranks": case.ranks, "env": env}))
    server = [sys.executable, "-m", "tests.train.forking", *LOADED]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(server, input="\n".join(jobs), env=env, stdout=subprocess.PIPE, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {one["number"]: one for one in told}


def environment(here: Path, out: Path, case: Wrong) -> dict[str, str]:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(here),
        "XDG_CACHE_HOME": str(here / "cache"),
        "OMP_NUM_THREADS": "1",
        contract.CODE: str(here),
        contract.RUN_FOLDER: str(out / "run"),
        contract.EXIT_FILE: str(out / "exit"),
        contract.CONFIG: json.dumps({**USUAL, **case.config}),
        **case.env,
    }
    return {name: value.replace("{here}", str(here)) for name, value in env.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_line_the_right_code_and_no_process_left(name: str, ended: Ended, here: Path) -> None:
    case, end = CASES[name], ended[name]
    out = here / f"out-{name}"
    said = [line for text in end["errors"] for line in text.splitlines()]
    expected = case.line.replace("{here}", str(here)).replace("{run}", str(out / "run"))
    # Ranks that meet the same error more than process_group.REPORT_SECONDS apart, on a busy machine, may both print it.
    assert len(set(said)) == 1, "\n".join(end["errors"])
    assert re.fullmatch("train: " + re.escape(expected).replace("…", ".*"), said[0]), said[0]
    assert case.exit in end["codes"]
    # A rank whose peer has exited ends with 1 by itself, if nothing ends it within the second of process_exit.leave.
    assert set(end["codes"]) <= {int(case.exit), int(contract.Exit.FAILED), *TERMINATED}, end["codes"]
    assert end["after"] < GONE
    marks = (out / "exit").read_text().split() if (out / "exit").exists() else []
    assert set(marks) == ({str(int(case.exit))} if case.exit != contract.Exit.FAILED else set())


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert "<!-- bad input -->" in page
    assert page == renewed(page), "python -m tests.train.wrongs renews it"

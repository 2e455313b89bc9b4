"""The day with a VM in docs/recipes/vm.md: its commands are run again, on a clock that stands still between them."""

from __future__ import annotations

import re
import shlex

from tests.cli.vms import Vms
from tests.command import ROOT, launch

PAGE = ROOT / "docs" / "recipes" / "vm.md"
BLOCK = re.compile(r"```text\n(\$ launch vm .*?)```", re.DOTALL)
STEP = re.compile(r"^\$ (launch .*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
MADE = "launch vm --gpus 2 --type l4 --name dev --zone us-central1-a --lease 4h"


def test_the_recipe_page_shows_the_real_output(vms: Vms) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert MADE in text
    launch(*shlex.split(MADE)[1:], "--detach", "--no-preflight", env=vms.env)
    machine = vms.compute.instance("us-central1-a", "dev")
    vms.clock.now = (machine.started or 0.0) + 300
    vms.cloud.compute.set_guest("dev", "launch/state", "ready")
    steps = [step for block in BLOCK.findall(text) for step in STEP.findall(block)]
    assert len(steps) >= 8
    for line, output in steps:
        ran = launch(*shlex.split(line)[1:], env=vms.env)
        assert (line, ran.err + ran.out) == (line, output)

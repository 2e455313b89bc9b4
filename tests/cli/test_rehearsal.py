"""What a rehearsal keeps beside its plan, and what it says when it is interrupted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from launcher.apply import local
from launcher.apply.attempts import End
from launcher.apply.requests import parsed, with_image
from launcher.cli.options import Flags, Output, words
from launcher.cli.printer import LinePrinter
from launcher.cli.rehearsal import Rehearsal, content, meaning, page, run, show
from launcher.cli.runfolder import prepare
from launcher.cli.summary import next_commands
from launcher.spec.models import JobSpec
from launcher.spec.reader import read
from tests.plan.planning import planned
from train import contract
from train.storage import open_storage

NASTY = (
    *("1e-4", "1e5", "no", "y", "n", "on", "null", "~", "0o17", "017", "0x1f", "1_000", "1:30", "2026-01-01", ".inf"),
    *("", " ", " a ", "a: b", "a #b", "#a", "- a", "[a", "{a", "*a", "&a", "!a", "|", ">", "%a", "@a", "`a", "'", '"'),
    *("\\", "\\n", "a\nb", "a\n\nb\n", "\n", "\ta", "a\r\nb", "#!/bin/sh\nset -e \n\n", "#!é\n", "é", "日本語"),
    *("\U0001f600", "\x07", "\x85", "\u2028", "\ufeffa", "=", "<<", "---", "...", "?", "a" * 300, "$(A)", "$$"),
)


def test_the_spec_beside_the_plan_says_the_same(tmp_path: Path) -> None:
    config = {"data": "1e-4", "optimizer": {"lr": 1e-5, "min_lr": 1e-300, "betas": [0.9, 1e-7]}, "steps": 10}
    plan = planned(
        "local",
        env={f"V{number}": text for number, text in enumerate(NASTY)},
        run={"args": list(NASTY), "config": config},
        limits={"hours": 0.5},
        output="/runs",
        provisioning=["spot"],
        labels={"no": "1e5"},
    )
    job = Rehearsal(request=plan.attempts[0].request, code=None, plan=plan)
    prepare(open_storage(str(tmp_path)), job, parsed(job.request), "")
    again = read(tmp_path / contract.SPEC)
    assert again == msgspec.convert(plan.spec, JobSpec)


def test_an_interrupt_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "rehearse", interrupted)
    request = planned("local", output=str(tmp_path)).attempts[0].request
    with pytest.raises(KeyboardInterrupt):
        run(Rehearsal(request=request, code=None), Output.text)
    shown = capsys.readouterr()
    assert f"everything was stopped. The run folder is {tmp_path}/{request['displayName']}." in shown.err
    assert not shown.out


def test_in_containers_the_image_stands_for_the_code() -> None:
    plan = planned("local")
    body = with_image(plan.attempts[0].request, "host/image:1")
    request = parsed(body)
    assert content(Rehearsal(request=body, code=None, content="digest", docker=True), request) == "host/image:1"
    assert content(Rehearsal(request=body, code=None, content="digest"), request) == "digest"
    # The image of a plan is made of that code: it is the same run, in containers or not.
    assert content(Rehearsal(request=body, code=None, content="digest", docker=True, plan=plan), request) == "digest"


def test_the_page_tells_the_image(capsys: pytest.CaptureFixture[str]) -> None:
    request = parsed(with_image(planned("local").attempts[0].request, "host/image:1"))
    for docker in (True, False):
        job = Rehearsal(request={}, code=None, docker=docker)
        shown = page(job, request, End(exit_codes={"workerpool0-0": 0}, seconds=1, time=0), None)
        for output in (Output.text, Output.json):
            show(shown, job, output)
            assert ("host/image:1" in capsys.readouterr().out) is docker


def test_the_cause_is_the_first_error_of_the_last_start(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter()
    lines = [
        "[rank0]: OldError: of the first start",
        "train.node: node 0: exit code 1; starting again (1 of 3 since the last checkpoint)",
        "  raise ValueError: in the middle of a line",
        "[rank1]: ValueError: bad sample 17",
        "RuntimeError: Connection closed by peer",
        "train.node: failed twice before its first step: starting again can't help (exit code 1)",
    ]
    for line in lines:
        printer("workerpool0-0", line)
    assert printer.error == "[workerpool0-0] ValueError: bad sample 17"
    assert capsys.readouterr().err.count("[workerpool0-0] ") == len(lines)


def test_the_next_commands_are_about_the_job_that_ran() -> None:
    typed = words(Flags(gpus=2, spot=True, set=["env.A=x y"], output="elsewhere"))
    assert typed == ["--gpus", "2", "--spot", "--set", "env.A=x y"]
    shown = "\n".join(next_commands("/runs/a", ["my job.yaml", *typed], 1, None))
    assert "vertex 'my job.yaml' --gpus 2 --spot --set 'env.A=x y' --output gs://BUCKET/runs --dry-run" in shown
    assert "--nodes 2" in shown
    assert "--nodes 2" not in "\n".join(next_commands("/runs/a", typed, 2, None))
    assert "vertex" not in "\n".join(next_commands("/runs/a", [], None, None))


@pytest.mark.parametrize(
    ("code", "words"), [(1, ""), (137, " (SIGKILL)"), (143, " (SIGTERM)"), (128, ""), (255, ""), (-9, "")]
)
def test_a_container_that_a_signal_has_ended(code: int, words: str) -> None:
    assert meaning(code) == words

"""What a rehearsal keeps beside its plan, and what it says when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launch_train.runfolder.starts import parse_metrics
from launcher.cli.flows import run_local
from launcher.cli.flows.run_local import run_here, show_result
from launcher.cli.flows.suggestions import Typed
from launcher.cli.options import Flags, Output, flag_words
from launcher.cli.ui.event_printer import LinePrinter
from launcher.cli.ui.run_summary import last_row, training_results
from launcher.cli.ui.streams import say
from launcher.diagnosis.output_cause import Cause
from launcher.runs.local_run import failure, meaning
from launcher.services.local.__main__ import content
from launcher.services.local.attempts import End
from launcher.services.local.job import Event, LocalJob, Outcome
from launcher.services.local.request import parse_request, with_image
from launcher.services.local.run_folder import prepare
from launcher.spec.models import JobSpec
from launcher.spec.reader import read
from tests.plan.planning import planned

NASTY = (
    *("1e-4", "1e5", "no", "y", "n", "on", "null", "~", "0o17", "017", "0x1f", "1_000", "1:30", "2026-01-01", ".inf"),
    *("", " ", " a ", "a: b", "a #b", "#a", "- a", "[a", "{a", "*a", "&a", "!a", "|", ">", "%a", "@a", "`a", "'", '"'),
    *("\\", "\\n", "a\nb", "a\n\nb\n", "\n", "\ta", "a\r\nb", "#!/bin/sh\nset -e \n\n", "#!é\n", "é", "日本語"),
    *("\U0001f600", "\x07", "\x85", "\u2028", "\ufeffa", "=", "<<", "---", "...", "?", "a" * 300, "$(A)", "$$"),
)


def test_the_stored_spec_gives_the_same_plan(tmp_path: Path) -> None:
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
    job = LocalJob(request=plan.attempts[0].request, plan=plan)
    prepare(open_storage(str(tmp_path)), job.plan, job.request, parse_request(job.request), "", say)
    again = read(tmp_path / runfolder.SPEC)
    assert again == msgspec.convert(plan.spec, JobSpec)


def test_an_interrupt_reports_what_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_job: object, on_event: Callable[[Event], object]) -> None:
        on_event(Outcome(end=End(exit_codes={"workerpool0-0": 143}, seconds=4, time=9, stopped="interrupted")))
        raise KeyboardInterrupt

    monkeypatch.setattr(run_local, "run_job", interrupted)
    request = planned("local", output=str(tmp_path)).attempts[0].request
    for output in (Output.text, Output.json):
        with pytest.raises(KeyboardInterrupt) as stop:
            run_here(LocalJob(request=request), output)
        shown = capsys.readouterr()
        assert f"all processes were stopped; the run folder is {tmp_path}/{request['displayName']}" in shown.err
        assert "the same command resumes it\nlaunch:     its script starts again in the same folder\n" in shown.err
        assert not shown.out
    data = vars(stop.value)["data"]  # printed with the error
    with pytest.raises(KeyboardInterrupt):
        run_here(LocalJob(request=request, docker=True), output, Typed(Path("job.yaml"), Flags(gpus=2, output="x")))
    resume = f"local job.yaml --gpus 2 --docker --resume {tmp_path}/{request['displayName']} its script starts again"
    assert resume in " ".join(capsys.readouterr().err.replace("launch: ", "").split())
    assert (data["state"], data["seconds"], data["exit_codes"]) == ("INTERRUPTED", 4, {"workerpool0-0": 143})


def test_with_docker_the_image_identifies_the_code() -> None:
    plan = planned("local")
    body = with_image(plan.attempts[0].request, "host/image:1")
    request = parse_request(body)
    assert content(LocalJob(request=body, content="digest", docker=True), request) == "host/image:1"
    assert content(LocalJob(request=body, content="digest"), request) == "digest"
    # The image of a plan is made of that code: it is the same run, in containers or not.
    assert content(LocalJob(request=body, content="digest", docker=True, plan=plan), request) == "digest"


def test_the_summary_names_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = with_image(planned("local", output=str(tmp_path)).attempts[0].request, "host/image:1")
    outcome = Outcome(end=End(exit_codes={"workerpool0-0": 0}, seconds=1, time=0))
    for docker in (True, False):
        for output in (Output.text, Output.json):
            job = LocalJob(request=body, docker=docker)
            show_result(job, parse_request(body), (), LinePrinter(), output, None, outcome, None)
            assert ("host/image:1" in capsys.readouterr().out) is docker


ENDED = "launch: node 0: exit code 1; failed once without a new checkpoint (exit code 1)"
ON_PURPOSE = "launch: node 0: invalid config or code; see the error above (exit code 2)"
GLOO = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
LOST = "launch: node 1: no word for 60 s (exit code 1)"
CRASH = "launch: rank 1 failed first: SIGSEGV (crash in native code)"
ABORT = "launch: rank 1 failed first: SIGABRT (abort in native code)"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["  raise ValueError: not at the beginning", "[rank1]: ValueError: bad", ENDED], "ValueError: bad"),
        (["[rank1]: ValueError: bad", GLOO, ENDED], "ValueError: bad"),
        ([GLOO, "[rank1]: ValueError: bad", ENDED], "ValueError: bad"),
        (
            ["ValueError: Caught ValueError in DataLoader worker process 0.", "ValueError: bad", ENDED],
            "ValueError: bad",
        ),
        ([GLOO, ENDED], GLOO.removeprefix("[rank0]: ")),
        ([GLOO, "train: data: no such file", ON_PURPOSE], "data: no such file"),
        (["x.Error: a handled one", "train: the end", ON_PURPOSE], "the end"),
        (["train: the end", "train: warning: rank 1 is still waiting for rank 0", ON_PURPOSE], "the end"),
        (["train: the end", "train: rank 1 exits: another rank has failed", ON_PURPOSE], "the end"),
        (["train: the end", "launch: node 0: it can't work (its own lines say why) (exit code 2)"], "the end"),
        (["train: CUDA out of memory", ENDED], "CUDA out of memory"),
        (["KeyError: 'handled'", GLOO, CRASH, ENDED], "rank 1 failed first: SIGSEGV (crash in native code)"),
        (["ValueError: bad", ABORT, ENDED], "ValueError: bad"),
        (["train: node 0: the disk is nearly full: 1 of 9 GB are free", LOST], "node 1: no word for 60 s"),
        (
            ["train: warning: machine metrics are no longer written: x", "train: no verdict: x", LOST],
            "node 1: no word for 60 s",
        ),
        (
            ["train: node 0, GPU 3: Xid 79: it has fallen off the bus", ENDED],
            "node 0, GPU 3: Xid 79: it has fallen off the bus",
        ),
        (["train: node 0: GPU 3 is lost: take another machine", ENDED], "node 0: GPU 3 is lost: take another machine"),
        ([GLOO, ABORT, ENDED], ABORT.removeprefix("launch: ")),
        ([GLOO, LOST], "node 1: no word for 60 s"),
        (
            ["OldError: 1", "launch: node 0: exit code 1; restarting (1 of 3 since …)", "NewError: 2"],
            "NewError: 2",
        ),
        (["train: warning: step 3: loss is nan", LOST], "node 1: no word for 60 s"),
        (["work.py: error: unrecognized arguments: --x", ON_PURPOSE], "unrecognized arguments: --x"),
        (
            ["launch: 2 ranks failed: KeyError: 'x' (work.py:3)", ABORT, ENDED],
            "KeyError: 'x' (work.py:3)",
        ),
        (["launch: rank 1 failed: ValueError: bad (a.py:3)", GLOO, ENDED], "ValueError: bad (a.py:3)"),
    ],
)
def test_an_error_about_a_lost_peer_is_not_the_cause(
    lines: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = LinePrinter()
    for line in lines:
        printer("workerpool0-0", line)
    assert printer.cause == ("workerpool0-0", cause)
    assert capsys.readouterr().err.count("[workerpool0-0] ") == len(lines)


def test_without_an_error_line_there_is_no_cause() -> None:
    printer = LinePrinter()
    printer("workerpool0-0", "step 1/3  loss 1.0")
    assert printer.cause is None
    assert str(failure(End(exit_codes={"a": 0, "b": 3}, seconds=1, time=0), "x", "/runs/x", None)) == (
        "the job failed: b exited with 3\nSee the output above; the run folder is /runs/x."
    )


def test_the_cause_has_its_replicas_name() -> None:
    end = End(exit_codes={"a": 1, "b": 2}, seconds=1, time=0)
    assert str(failure(end, "x", None, Cause("b", "model: no such thing"))) == (
        "the job failed: model: no such thing\nb exited with 2 (invalid config or code)\nSee the output above."
    )


def test_the_suggested_command_repeats_the_flags() -> None:
    typed = flag_words(Flags(gpus=2, spot=True, set=["env.A=x y"], output="elsewhere"))
    assert typed == ["--gpus", "2", "--spot", "--set", "env.A=x y"]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (1, "2.0000 (1 step)"),
        (10, "2.0000 (mean of the 10 steps)"),
        (11, "4.0000 → 2.0000 (mean of the first and of the last 5 of 11 steps)"),
    ],
)
def test_a_single_mean_loss_is_printed_once(step: int, text: str) -> None:
    end = {"step": step, "train_loss_first": 4.0, "train_loss_last": 2.0, "train_loss_steps": 5}
    assert list(training_results(end)) == [("loss", text)]


def test_one_step_is_singular() -> None:
    found = parse_metrics({runfolder.metrics_part(1, 0, 0, 0): b'{"step": 7, "loss": 1.0}\n'})
    assert last_row(found) == "1 step; last (step 7): loss 1"


@pytest.mark.parametrize(
    ("code", "words"), [(1, ""), (137, " (SIGKILL)"), (143, " (SIGTERM)"), (128, ""), (255, ""), (-9, "")]
)
def test_a_container_ended_by_a_signal(code: int, words: str) -> None:
    assert meaning(code) == words

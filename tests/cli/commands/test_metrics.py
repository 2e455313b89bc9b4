"""`launch metrics`: from a folder here, and of a run in the cloud."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher.cli.commands.metrics import ROWS, fitting_columns, spread
from tests.cli.cloudjobs import Job
from tests.command import launch


def part(*rows: Mapping[str, object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


STEPS = [{"step": n, "loss": 1 / n, "lr": 1e-3, "tokens_per_s": 12345.6, "time": 1.7e9 + n} for n in range(1, 101)]
EVAL = {"event": "eval", "step": 100, "loss": 0.25}


def test_metrics_of_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-1"
    (folder / runfolder.METRICS).mkdir(parents=True)
    (folder / runfolder.metrics_part(1, 0, 0, 0)).write_bytes(part({"event": "start"}, *STEPS, EVAL))
    shown = launch("metrics", "./tiny-1", cwd=tmp_path).out.splitlines()
    assert shown[0].split() == ["step", "loss", "lr", "tokens_per_s"]
    assert shown[1].split() == ["1", "1", "0.001", "12,346"]
    assert shown[ROWS].split() == ["100", "0.01", "0.001", "12,346"]
    assert shown[ROWS + 1] == f"{ROWS} of 100 steps (--all)"
    assert [line.split() for line in shown[ROWS + 2 :]] == [[], ["step", "eval_loss"], ["100", "0.25"]]
    assert len(launch("metrics", "./tiny-1", "--all", cwd=tmp_path).out.splitlines()) == 104
    named = launch("metrics", "./tiny-1", "--metric", "eval_loss", cwd=tmp_path)
    assert (named.code, "--metric loss" in named.err) == (2, True)
    data = json.loads(launch("metrics", "./tiny-1", "-o", "json", cwd=tmp_path).out)
    assert (data["run"], data["rows"], data["events"][-1]) == ("tiny-1", STEPS, EVAL)


SAMPLES: list[dict[str, object]] = [
    {"event": "samples", "step": 50, "kind": "text", "samples": [{"prompt": "a", "text": "b"}]},
    {
        "event": "samples",
        "step": 100,
        "kind": "text",
        "samples": [
            {"prompt": "Once\nupon", "text": " a\x1b[31m time hf_canaryCANARY0123\n" + "long " * 40 + "\n" * 20}
        ],
    },
    {"event": "samples", "step": "\x1b[31m", "kind": "text", "samples": [{"prompt": "no", "text": "no"}]},
    {"event": "samples", "of": "a script"},
]
GUESSES = [{"predicted": "cat", "true": "cat", "probability": 0.5}, {"predicted": "cat", "true": "dog"}]


def test_the_newest_sample(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-1"
    (folder / runfolder.METRICS).mkdir(parents=True)
    (folder / runfolder.metrics_part(1, 0, 0, 0)).write_bytes(part(*STEPS, EVAL, *SAMPLES))
    shown = launch("metrics", "./tiny-1", cwd=tmp_path).out.splitlines()
    at = shown.index("prompt at step 100")
    assert shown[at : at + 7] == [
        "prompt at step 100",
        "  Once",
        "  upon",
        "",
        "continued by the model",
        "   a\ufffd[31m time •••",
        f"  {'long ' * 40}"[:80],
    ]
    assert len(shown[at:]) <= 13
    images = {"event": "samples", "step": 100, "kind": "images", "samples": GUESSES}
    (folder / runfolder.metrics_part(1, 0, 0, 1)).write_bytes(part(images))
    shown = launch("metrics", "./tiny-1", cwd=tmp_path).out.splitlines()
    assert shown[-2:] == ["images at step 100", "  cat 50.0%, cat (true: dog)"]


def test_custom_metrics_fit_the_screen() -> None:
    rows = [{"step": 1, "note": "text", **{f"an_own_metric_{n}": n / 7 for n in range(9)}}]
    assert fitting_columns(rows) == ["step", *(f"an_own_metric_{n}" for n in range(4))]


@pytest.mark.parametrize("count", [1, ROWS, ROWS + 1, 1000])
def test_the_first_and_the_last_step_are_shown(count: int) -> None:
    shown = spread([{"step": n} for n in range(count)], ROWS)
    assert (shown[0]["step"], shown[-1]["step"], len(shown)) == (0, count - 1, min(count, ROWS))
    assert [row["step"] for row in shown] == sorted({row["step"] for row in shown})


def test_metrics_of_a_vertex_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    assert "has written no metrics yet" in job.launch("metrics", run, code=1).err
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    open_storage(f"gs://my-bucket/runs/{run}").write(runfolder.metrics_part(1, 0, 0, 0), part(*STEPS))
    assert job.launch("metrics", "job").out.splitlines()[-2].split()[0] == "100"
    assert job.data("metrics", run)["rows"] == STEPS


def test_metrics_of_an_unknown_run(job: Job, tmp_path: Path) -> None:
    assert "no run nothing" in job.launch("metrics", "nothing", code=2).err
    assert str(tmp_path) not in job.launch("metrics", "nothing", code=2).err


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    missing = launch("metrics", "runs/nothing", cwd=tmp_path)
    assert (missing.code, missing.err.splitlines()[0]) == (2, "error: folder runs/nothing does not exist")
    (tmp_path / "failed-1" / "attempts").mkdir(parents=True)
    empty = launch("metrics", "failed-1", cwd=tmp_path)
    assert (empty.code, "failed-1 has written no metrics yet" in empty.err) == (1, True)


def test_curves_in_the_width_of_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-1"
    (folder / runfolder.METRICS).mkdir(parents=True)
    broken = {"step": 101, "loss": None, "nonfinite": {"loss": "nan"}}
    (folder / runfolder.metrics_part(1, 0, 0, 0)).write_bytes(part({"event": "start"}, *STEPS, EVAL, broken))
    ran = launch("metrics", "./tiny-1", "--plot", cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    shown = ran.out.splitlines()
    assert max(map(len, shown)) == 80
    assert "\x1b" not in ran.out
    assert shown[-2].split() == ["1", "100"]
    assert ran.out.count("o") > 1  # the evaluation
    assert shown[-1].startswith("1 step of 101")
    two = launch("metrics", "./tiny-1", "--metric", "lr", "--metric", "tokens_per_s", cwd=tmp_path).out
    assert [line for line in two.splitlines() if "by step" in line] == ["lr by step", "tokens_per_s by step"]
    for wrong, text in ((["--metric", "los"], "Did you mean loss?"), (["--plot", "-o", "json"], "-o json")):
        ran = launch("metrics", "./tiny-1", *wrong, cwd=tmp_path)
        assert (ran.code, text in ran.err) == (2, True)

"""Values of a script that are no numbers: they are shown as what they are, and never passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.runfolder.starts import parse_metrics
from launcher.cli.commands.metrics import metric_lines
from launcher.cli.ui.event_printer import progress_text
from launcher.cli.ui.run_summary import results_data, summary_lines
from launcher.runs.metrics.progress import summarize_rows
from tests.command import launch

SCRIPT = """
from launch_train import metrics
losses = [2.0, 1.0, float("nan"), float("nan"), {last}]
for step, loss in enumerate(losses, 1):
    metrics.log(step, loss=loss, lr=0.01, worst=float("-inf") if step == 4 else 0.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("last", "shown"), [('float("nan")', "nan"), ('float("inf")', "inf"), ("0.5", "0.5")])
def test_a_nonfinite_loss_of_a_script(tmp_path: Path, last: str, shown: str) -> None:
    (tmp_path / "work.py").write_text(SCRIPT.format(last=last))
    (tmp_path / "job.yaml").write_text(
        "name: job\nmachine: {type: l4, gpus: 1}\nregions: any\nrun: {script: work.py, launcher: python}\n"
    )
    ran = launch("local", "job.yaml", "--output", "runs", cwd=tmp_path)
    assert ran.code == 0, ran.err
    (folder,) = (tmp_path / "runs").glob("job-*")

    assert ran.err.count("loss is nan") == 1
    assert "step 3: loss is nan" in ran.err
    assert "step 4: worst is -inf" in ran.err

    assert f"last (step 5): loss {shown}, lr 0.01" in ran.out
    count = 2 if shown == "0.5" else 3
    assert f"loss was nan or infinite in {count} of 5 steps, first in step 3" in " ".join(ran.out.split())

    table = [line.split() for line in launch("metrics", folder, cwd=tmp_path).out.splitlines()]
    assert table[0][:2] == ["step", "loss"]
    assert [row[1] for row in table[1:6]] == ["2", "1", "nan", "nan", shown]
    assert any("first" in row for row in table[6:])

    again = json.loads(launch("local", "job.yaml", "--output", "runs", "-o", "json", cwd=tmp_path).out)
    data = json.loads(launch("metrics", folder, "-o", "json", cwd=tmp_path).out)
    assert again["nonfinite"] == data["nonfinite"]
    assert data["nonfinite"]["loss"] == {"first_step": 3, "steps": count}
    assert data["nonfinite"]["worst"] == {"first_step": 4, "steps": 1}
    assert (data["rows"][3]["loss"], data["rows"][3]["nonfinite"]) == (None, {"loss": "nan", "worst": "-inf"})


def test_finite_values_need_no_remark(tmp_path: Path) -> None:
    found = parse_metrics({runfolder.metrics_part(1, 0, 0, 0): b'{"step": 1, "loss": 0.5, "note": null}\n'})
    assert results_data(found)["nonfinite"] == {}
    assert not [line for line in summary_lines("run", None, True, 1.0, found) if "nan" in line]


def test_a_nonfinite_mean_loss_of_the_trainer() -> None:
    end = {"event": "end", "step": 30, "train_loss_first": 2.0, "train_loss_last": None, "eval_loss": None}
    end["nonfinite"] = {"train_loss_last": "nan", "eval_loss": "inf"}
    found = parse_metrics({runfolder.metrics_part(1, 0, 0, 0): json.dumps(end).encode()})
    page = " ".join("\n".join(summary_lines("run", None, True, 1.0, found)).split())
    assert "2.0000 → nan" in page
    assert "held-out inf" in page


def test_a_skipped_step_has_its_own_line() -> None:
    row = {"step": 1, "loss": 0.5, "grad_norm": None, "skipped": 1, "nonfinite": {"grad_norm": "inf"}}
    found = parse_metrics({runfolder.metrics_part(1, 0, 0, 0): json.dumps(row).encode()})
    assert found.nonfinite == {}
    assert "inf" in "\n".join(metric_lines("run", found, 20))


def test_a_custom_metric_named_nonfinite_is_a_value() -> None:
    row = {"step": 1, "loss": None, "nonfinite": 3}
    found = parse_metrics({runfolder.metrics_part(1, 0, 0, 0): json.dumps(row).encode()})
    assert found.nonfinite == {}
    assert "3" in "\n".join(metric_lines("run", found, 20))


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_progress_of_a_running_job(text: str) -> None:
    progress = summarize_rows(({"step": 3, "loss": None, "nonfinite": {"loss": text}},), 10, None)
    assert f"loss {text}" in progress_text(progress)

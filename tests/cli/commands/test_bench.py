"""`launch bench`, and the spec that measures a rented machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch_train.bench import measure
from launch_train.bench.figures import PARTS
from launch_train.common import contract
from launcher.cli.commands import bench
from launcher.cli.options import Output
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.inputs import content
from tests.command import launch


@pytest.mark.slow
def test_json_report_of_two_ranks() -> None:
    ran = launch("bench", "--quick", "--only", "memory,allreduce", "--gpus", "2", "-o", "json")
    assert ran.code == 0, ran.shown
    data = json.loads(ran.out)
    names = ["memory copy", "memory triad", *(f"all-reduce {size} MB" for size in measure.QUICK_SIZES), measure.LINK]
    assert (data["world_size"], data["ok"], data["findings"], list(data["figures"])) == (2, True, [], names)
    assert [(rank["rank"], rank["gpu"], list(rank["figures"])) for rank in data["ranks"]] == [
        (0, 0, names),
        (1, 1, names),
    ]
    each = [rank["figures"]["all-reduce 64 MB"]["value"] for rank in data["ranks"]]
    assert each[0] == each[1] > 0


@pytest.mark.slow
def test_a_train_py_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('not me')")
    ran = launch("bench", "--only", "host", cwd=tmp_path)
    assert ran.code == 0, ran.shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "yaml"], "-o yaml is not available"),
        (["--gpus", "0"], "--gpus"),
        (["job.yaml"], "job.yaml"),
    ],
)
def test_invalid_options_are_usage_errors(words: list[str], says: str) -> None:
    ran = launch("bench", *words)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize("parts", ["foo", "matmul,foo", ",", "Matmul"])
def test_an_unknown_part_is_refused_with_the_known_ones(parts: str, capfd: pytest.CaptureFixture[str]) -> None:
    ran = launch("bench", "--only", parts)
    assert (ran.code, ran.out) == (2, "")
    assert capfd.readouterr().err == ""  # nothing was started
    assert all(part in ran.err for part in PARTS)
    assert repr(parts.rpartition(",")[2]) in ran.err


@pytest.mark.parametrize(("code", "error"), [(2, UsageError), (70, JobFailed), (1, LaunchError), (137, LaunchError)])
def test_exit_codes_of_the_benchmark(code: int, error: type[LaunchError], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(error) as caught:
        bench.run_benchmark(["sh", "-c", f"echo the table; exit {code}"], Output.text)
    assert type(caught.value) is error
    assert capsys.readouterr().out == ("the table\n" if code == contract.Exit.UNFIT else "")
    assert bench.run_benchmark(["echo", "the table"], Output.text) == "the table\n"


def test_the_bench_spec_runs_the_benchmark_on_a_cloud_machine() -> None:
    ran = launch("vertex", "job_specs/bench.yaml", "--type", "h100", "--gpus", "8", "--dry-run", "-o", "json")
    assert ran.code == 0, ran.shown
    assert "launch_train.bench" in ran.out


def test_the_image_has_the_table_of_peaks() -> None:
    names = {file.name for file in content.trainer()}
    assert {"launch_train/bench/__main__.py", "launch_train/bench/peaks.csv"} <= names


SPEC = "name: x\nmachine: {type: l4}\nregions: [us-central1]\nrun: {script: a.py%s}\n"


def test_preflight_reaches_the_node_and_keeps_the_run_id(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    plans = []
    for more in ("", ", preflight: off", ", preflight: bench"):
        (tmp_path / "job.yaml").write_text(SPEC % more)
        ran = launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path)
        assert ran.code == 0, ran.shown
        plans.append(json.loads(ran.out))
    assert len({plan["run"] for plan in plans}) == 1
    pools = [plan["attempts"][0]["request"]["jobSpec"]["workerPoolSpecs"] for plan in plans]
    env = [{one["name"]: one["value"] for one in pool[0]["containerSpec"]["env"]} for pool in pools]
    assert [found.get(contract.PREFLIGHT) for found in env] == [None, None, "bench"]


def test_the_hang_timeout_reaches_the_node_and_keeps_the_run_id(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    plans = []
    for more in ("", ", hang_after: 90"):
        (tmp_path / "job.yaml").write_text(SPEC % more)
        ran = launch("vertex", "job.yaml", "--dry-run", "-o", "json", cwd=tmp_path)
        assert ran.code == 0, ran.shown
        plans.append(json.loads(ran.out))
    assert len({plan["run"] for plan in plans}) == 1
    pools = [plan["attempts"][0]["request"]["jobSpec"]["workerPoolSpecs"] for plan in plans]
    env = [{one["name"]: one["value"] for one in pool[0]["containerSpec"]["env"]} for pool in pools]
    assert [found.get(contract.HANG_AFTER) for found in env] == [None, "90"]


@pytest.mark.parametrize("wrong", ["0", "soon", "-5", "true", "1000000"])
def test_an_invalid_hang_timeout_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "job.yaml").write_text(SPEC % f", hang_after: {wrong}")
    ran = launch("vertex", "job.yaml", "--dry-run", cwd=tmp_path)
    assert (ran.code, "run.hang_after" in ran.err) == (2, True)


def test_an_unknown_preflight_value_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "job.yaml").write_text(SPEC % ", preflight: yes")
    ran = launch("vertex", "job.yaml", "--dry-run", cwd=tmp_path)
    assert (ran.code, "run.preflight" in ran.err) == (2, True)

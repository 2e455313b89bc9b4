"""`launch local` with a request: what goes with it, what is shown, and what it can't be run with."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import SPECS, launch
from tests.e2e.running import run, started
from tests.plan.planning import request

SAY = "import os; print('ran', os.environ.get('A'))"


def by_hand(folder: Path, code: str = SAY, **env: str) -> Path:
    """A request that runs a line of Python."""
    container = {"command": ["python", "-c", code], "env": [{"name": name, "value": env[name]} for name in env]}
    body = {"displayName": "by-hand", "jobSpec": {"workerPoolSpecs": [{"containerSpec": container}]}}
    return saved(folder, body)


def saved(folder: Path, body: Any) -> Path:
    path = folder / "request.json"
    path.write_text(json.dumps(body) if not isinstance(body, str) else body)
    return path


def refused(*argv: str | Path) -> str:
    ran = launch("local", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    return ran.err


@pytest.mark.parametrize("output", ["text", "json", "yaml"])
def test_a_dry_run_of_a_request_starts_nothing(tmp_path: Path, output: str) -> None:
    path = by_hand(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    ran = launch("local", "--request", path, "--output", tmp_path / "out", "--dry-run", "-o", output)
    assert (ran.code, ran.err) == (0, "")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
    moved = str(tmp_path / "out" / "by-hand")
    if output == "text":
        assert "by-hand  on this machine" in ran.out
        assert "Nothing was started" in ran.out
        assert max(map(len, ran.out.splitlines())) <= 80 or len(str(tmp_path)) > 60
    else:
        shown = json.loads(ran.out)["request"] if output == "json" else yaml.safe_load(ran.out)
        assert shown["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"] == moved
        assert shown["jobSpec"]["workerPoolSpecs"] == json.loads(path.read_text())["jobSpec"]["workerPoolSpecs"]


def test_the_plan_of_a_request_file(tmp_path: Path) -> None:
    body = request(output="gs://bucket/runs", machine={"type": "h100", "gpus": 8, "nodes": 3})
    ran = launch("local", "--request", saved(tmp_path, body), "--dry-run")
    assert "pool 0    1 replica, 8 GPUs: python -m launch_train.node --module" in ran.out
    assert "pool 1    2 replicas, 8 GPUs each: python -m launch_train.node --module" in ran.out
    assert f"output    gs://bucket/runs/{body['displayName']}" in ran.out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ((str(SPECS / "quickstart.yaml"),), "the spec"),
        (("--gpus", "2"), "--gpus"),
        (("--nodes", "2"), "--nodes"),
        (("--spot",), "--spot"),
        (("--flex-start",), "--flex-start"),
        (("--region", "us-central1"), "--region"),
        (("--run-id", "a"), "--run-id"),
        (("--hours", "0"), "--hours"),
        (("--set", "name=a"), "--set"),
    ],
)
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_request_file_excludes_a_spec_and_its_flags(
    tmp_path: Path, more: tuple[str, ...], named: str, dry_run: tuple[str, ...]
) -> None:
    assert named in refused("--request", by_hand(tmp_path), *more, *dry_run)


def test_code_needs_a_request_file_and_a_folder(tmp_path: Path) -> None:
    assert "--code requires --request" in refused("--code", tmp_path, "--dry-run")
    path = by_hand(tmp_path, "print('ran', open('helper.txt').read())")
    assert "is not a folder" in refused("--request", path, "--code", path)
    assert "is not a folder" in refused("--request", path, "--code", tmp_path / "none", "--dry-run")
    (tmp_path / "helper.txt").write_text("the helper")
    ran = launch("local", "--request", path, "--code", tmp_path)
    assert (ran.code, "ran the helper" in ran.err) == (0, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", " as JSON: "),
        ("[" * 100_000, " as JSON: "),
        ("\ufeff{}", "no jobSpec"),
        ("[]", "is not a JSON object"),
        ("{}", "workerPoolSpecs"),
        ('{"jobSpec": null}', "no jobSpec"),
        ('{"jobSpec": {"workerPoolSpecs": [null]}}', "no containerSpec"),
        ('{"jobSpec": {"workerPoolSpecs": [{"containerSpec": {}, "replicaCount": "0"}]}}', "replicaCount"),
        ('{"attempts": []}', "attempts[0].request"),
    ],
)
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_an_invalid_request_file_is_refused(tmp_path: Path, text: str, words: str, dry_run: tuple[str, ...]) -> None:
    assert words in refused("--request", saved(tmp_path, text), *dry_run)


def test_a_missing_request_file_is_refused(tmp_path: Path) -> None:
    assert "cannot read --request" in refused("--request", tmp_path / "none.json")
    assert "cannot read --request" in refused("--request", tmp_path)


def test_a_request_runs_and_its_output_is_moved(tmp_path: Path) -> None:
    ran = launch("local", "--request", by_hand(tmp_path, A="1"), "--output", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "[workerpool0-0] ran 1" in ran.err
    assert "by-hand succeeded" in ran.out
    assert (tmp_path / "out" / "by-hand" / "attempts" / "0001.json").exists()


def test_an_unwritable_output_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = by_hand(tmp_path)
    for output in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        for what in (("--request", path), (SPECS / "quickstart.yaml",)):
            err = refused(*what, "--output", output)
            assert "the run folder can't be used" in err
            assert "--output DIR" in err
            assert "ran" not in err.split()
    (tmp_path / "odd" / "by-hand" / "terminal").mkdir(parents=True)
    assert "can't be read: Is a directory" in refused("--request", path, "--output", tmp_path / "odd")


def in_image(folder: Path) -> Path:
    """A request that runs the command of an image, and writes into a folder beside it."""
    pool = {"containerSpec": {"imageUri": "localhost:1/none:1"}}
    spec = {"workerPoolSpecs": [pool, pool], "baseOutputDirectory": {"outputUriPrefix": str(folder / "out" / "run")}}
    return saved(folder, {"displayName": "in-image", "jobSpec": spec})


def test_a_dry_run_with_docker_names_the_image(tmp_path: Path) -> None:
    ran = launch("local", "--docker", "--request", in_image(tmp_path), "--dry-run")
    assert ran.code == 0
    assert ran.out.count("image     localhost:1/none:1") == 1
    assert "image     not used" in launch("local", "--request", in_image(tmp_path), "--dry-run").out


def test_with_docker_the_code_comes_from_the_image(tmp_path: Path) -> None:
    assert "--code cannot be combined with --docker" in refused(
        "--docker", "--request", in_image(tmp_path), "--code", tmp_path
    )


def test_without_a_docker_engine_nothing_starts(tmp_path: Path) -> None:
    """As a separate process: Docker's SDK doesn't close the socket that leads nowhere."""
    env = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    ran = run("local", "--docker", "--request", in_image(tmp_path), cwd=tmp_path, env=env)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "no Docker engine" in ran.stderr
    assert "DOCKER_HOST" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not [*tmp_path.glob("out/run/attempts/*")]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_exit_code_names_the_signal(tmp_path: Path, signum: signal.Signals) -> None:
    request = tmp_path / "request.json"
    pool = {"containerSpec": {"command": ["python", "-c", "import time; print('ready', flush=True); time.sleep(60)"]}}
    request.write_text(json.dumps({"displayName": "job", "jobSpec": {"workerPoolSpecs": [pool]}}))
    with started("local", "--request", request, cwd=tmp_path) as process:
        assert process.stderr
        assert any("ready" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "interrupted; all processes were stopped" in err
    assert "the same command starts the job again" in err.splitlines()[-1]


@pytest.mark.parametrize("attempts", ["[{}]", "[3]", '[{"request": 3}]', '{"0": 1}'])
def test_a_plan_without_a_request(tmp_path: Path, attempts: str) -> None:
    (tmp_path / "plan.json").write_text(f'{{"attempts": {attempts}}}')
    assert "the request has no jobSpec" in refused("--request", tmp_path / "plan.json")


def test_a_relative_folder_is_refused_in_a_container(tmp_path: Path) -> None:
    request = json.loads(in_image(tmp_path).read_text())
    request["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"] = [{"name": "LAUNCH_RUN_FOLDER", "value": "out"}]
    (tmp_path / "relative.json").write_text(json.dumps(request))
    ran = launch("local", "--docker", "--request", tmp_path / "relative.json", cwd=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "the job writes to out, a relative path" in ran.err
    assert not [*tmp_path.glob("out/attempts/*")]


def with_setup(folder: Path, *lines: str) -> Path:
    """A spec whose script lists its folder."""
    (folder / "code").mkdir()
    (folder / "code" / "a.py").write_text("import os\nprint('files:', *sorted(os.listdir()))\n")
    fields = {"image": {"code": "code", "setup": [*lines]}, "run": {"script": "a.py", "launcher": "python"}}
    spec = {"name": "job", "machine": {"type": "l4", "gpus": 1}, "output": str(folder / "runs"), **fields}
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return folder / "job.yaml"


def test_setup_is_printed_and_run_on_this_machine_only_on_request(tmp_path: Path) -> None:
    spec = with_setup(tmp_path, "echo made >made.txt; echo said", "command -v python3 >which.txt")
    plan = launch("local", spec, "--dry-run")
    assert "image.setup is not run on this machine: echo made >made.txt; echo said" in " ".join(plan.out.split())
    assert "setup is not run" not in launch("local", spec, "--dry-run", "--docker").out
    sweep = launch("sweep", spec, "--to", "local", "--set", "env.A=1,2", "--dry-run")
    assert "image.setup is not run on this machine" in " ".join(sweep.out.split()), sweep
    ran = run("local", spec, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "warning: image.setup is not run on this machine: echo made >made.txt; echo said; command -v" in ran.stderr
    assert "files: a.py\n" in ran.stdout + ran.stderr
    ran = run("local", spec, "--setup", "-o", "json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["exit_codes"] == {"workerpool0-0": 0}
    assert "\nsaid\n" in ran.stderr
    assert "not run" not in ran.stderr
    assert "files: a.py made.txt which.txt\n" in ran.stderr
    assert Path((tmp_path / "code" / "which.txt").read_text()).parent == Path(sys.executable).parent


def test_a_line_of_setup_that_fails_starts_no_run(tmp_path: Path) -> None:
    spec = with_setup(tmp_path, "exit 7", "touch made.txt")
    ran = run("local", spec, "--setup", cwd=tmp_path)
    assert ran.returncode == 1
    assert "'exit 7' failed on this machine (exit code 7)" in ran.stderr
    assert not [*tmp_path.rglob("made.txt"), *tmp_path.glob("runs")]


@pytest.mark.parametrize("flag", ["--docker", "--dry-run"])
def test_setup_on_this_machine_is_part_of_neither_a_container_nor_a_dry_run(tmp_path: Path, flag: str) -> None:
    assert f"--setup cannot be combined with {flag}" in refused(with_setup(tmp_path, "true"), "--setup", flag)


def test_setup_without_lines_is_refused(tmp_path: Path) -> None:
    assert "the spec has no image.setup" in refused(with_setup(tmp_path), "--setup")

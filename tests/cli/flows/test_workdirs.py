"""`launch local` runs in fresh copies of what the image would hold, unless it is told to run in place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Ran
from tests.e2e.running import only_run, run

HEAD = "name: a\nmachine: {type: l4}\n"


def project(folder: Path, script: str, run: str = "", **files: str) -> Path:
    """A spec with a script that plain Python starts, and files by name (a double underscore is a dot)."""
    for name, text in {**files, "work__py": script}.items():
        (folder / name.replace("__", ".")).write_text(text)
    (folder / "job.yaml").write_text(f"{HEAD}run: {{script: work.py, launcher: python{run}}}\n")
    return folder


def local(folder: Path, *argv: str) -> Ran:
    """`launch local` as a separate process."""
    ran = run("local", "job.yaml", "--output", "runs", *argv, cwd=folder)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_working_folder_has_only_the_images_files(tmp_path: Path) -> None:
    """nanoGPT's train.bin is ignored by git: the job does not have it, and so neither has the rehearsal."""
    project(tmp_path, "print(open('train.bin').read())", train__bin="data", __gitignore="*.bin\n")
    assert (tmp_path / ".gitignore").exists()
    ran = local(tmp_path)
    assert (ran.code, "FileNotFoundError" in ran.err) == (3, True)
    assert "train.bin (work.py:1)" in ran.err  # a warning before anything is started
    in_place = local(tmp_path, "--in-place", "--new")
    assert (in_place.code, "[workerpool0-0] data\n" in in_place.err) == (0, True), in_place.shown


@pytest.mark.slow
def test_uploaded_event_files_are_not_reported_as_lost(tmp_path: Path) -> None:
    script = (
        "import pathlib\npathlib.Path('tb/a').mkdir(parents=True)\n"
        "for name in ('tb/a/events.out.tfevents.1.h', 'other.pt'): pathlib.Path(name).write_text('x')\n"
    )
    project(tmp_path, script)
    ran = local(tmp_path, "--set", "run.metrics.tensorboard=tb")
    assert ran.code == 0, ran.err
    assert "which a job loses: workerpool0-0/other.pt (1 B); moved" in ran.err
    assert "write it to $LAUNCH_RUN_PATH" in ran.err
    assert [*(tmp_path / "runs").rglob("logs/script/a/events.out.tfevents.1.h")]


def test_the_plan_counts_the_files_that_are_copied(tmp_path: Path) -> None:
    project(tmp_path, "", train__bin="data", __gitignore="*.bin\n")
    ran = local(tmp_path, "--dry-run")
    assert ran.code == 0, ran.err
    (code,) = [line.split() for line in ran.out.splitlines() if line.startswith("code ")]
    assert code[1:3] == ["2", "files,"]  # work.py and .gitignore


def test_files_of_one_start_are_not_seen_by_the_next(tmp_path: Path) -> None:
    """Neither a snapshot beside the script nor a change of a file of the code; and it is no code of the next run."""
    script = (
        "import os\nprint('resumed' if os.path.exists('out/ckpt.pt') else 'fresh', open('notes.txt').read())\n"
        "os.makedirs('out', exist_ok=True)\n"
        "open('out/ckpt.pt', 'w').write('x' * 1000)\nopen('notes.txt', 'r+').write('NOTES')\n"
    )
    project(tmp_path, script, notes__txt="notes")
    before = below(tmp_path)
    for number in ("", "-2"):
        ran = local(tmp_path, "--new", "-o", "json")
        assert ran.code == 0, ran.err
        assert "[workerpool0-0] fresh notes\n" in ran.err
        shown = json.loads(ran.out)
        (left,) = shown["left_behind"]
        assert left["files"] == {"workerpool0-0/out/ckpt.pt": 1000, "workerpool0-0/notes.txt": 5}
        kept = Path(left["folder"])
        assert kept.parent.parent == Path(shown["run_folder"])
        assert (kept / "workerpool0-0" / "notes.txt").read_text() == "NOTES"
        assert shown["run"].endswith(number)
        assert {name for name in below(tmp_path) if not name.startswith("runs/")} == before
    assert len({name.name.removesuffix("-2") for name in (tmp_path / "runs").iterdir()}) == 1  # the same code


@pytest.mark.slow
def test_after_a_preemption_the_folder_is_fresh_and_the_code_is_the_same(tmp_path: Path) -> None:
    """As on another machine: what the first start wrote has gone, and an edit in between is not in the image."""
    script = (
        "import os, pathlib, sys, time\n"
        "print('found', os.path.exists('mine'), flush=True)\n"
        "pathlib.Path('mine').touch()\n"
        "marker = pathlib.Path(os.environ['LAUNCH_RUN_FOLDER'], 'marker')\n"
        "if marker.exists(): sys.exit()\n"
        "marker.touch()\n"
        "pathlib.Path(sys.argv[1]).write_text('edited = 1 / 0')\n"
        "time.sleep(60)\n"
    )
    project(tmp_path, script, run=f", args: [{tmp_path / 'work.py'}]")
    ran = local(tmp_path, "--preempt-after", "10s")
    assert ran.code == 0, ran.err
    assert ran.err.count("[workerpool0-0] found False\n") == 2
    assert below(only_run(tmp_path / "runs") / "workdirs") == {f"{number}/workerpool0-0/mine" for number in (1, 2)}


@pytest.mark.slow
def test_a_restart_in_the_same_container_keeps_its_files(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfound = os.path.exists('mine')\nprint('found', found)\nopen('mine', 'w')\nsys.exit(not found)"
    )
    project(tmp_path, script)
    ran = local(tmp_path)
    assert ran.code == 0, ran.err
    assert "[workerpool0-0] found False\n" in ran.err
    assert "[workerpool0-0] found True\n" in ran.err


@pytest.mark.slow
def test_each_node_has_its_own_folder(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, time\nnode = os.environ['LAUNCH_NODE']\nopen(f'of-{node}', 'w')\n"
        "run = pathlib.Path(os.environ['LAUNCH_RUN_FOLDER'])\n(run / f'here-{node}').touch()\n"
        "while len([*run.glob('here-*')]) < 2: time.sleep(0.05)\n"
        "print('sees', sorted(os.listdir('.')))\n"
    )
    project(tmp_path, script)
    ran = local(tmp_path, "--nodes", "2")
    assert ran.code == 0, ran.err
    for number in (0, 1):
        assert f"[workerpool{number}-0] sees ['of-{number}', 'work.py']\n" in ran.err


def test_a_request_runs_in_a_copy_of_its_code_too(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.txt").write_text("x")
    pool = {"containerSpec": {"command": ["python", "-c", "open('new', 'w'); print(open('helper.txt').read())"]}}
    (tmp_path / "r.json").write_text(json.dumps({"displayName": "a", "jobSpec": {"workerPoolSpecs": [pool]}}))
    for flags, written in (((), False), (("--in-place",), True)):
        ran = run("local", "--request", "r.json", "--code", "code", *flags, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
        assert (ran.returncode, (tmp_path / "code" / "new").exists()) == (0, written), ran.stderr
    assert len([*tmp_path.glob("launch-workdirs-*/workerpool0-0/new")]) == 1  # there is no run folder for it


@pytest.mark.parametrize("argv", [("--docker", "--in-place")])
def test_in_place_excludes_docker(tmp_path: Path, argv: tuple[str, ...]) -> None:
    project(tmp_path, "")
    ran = local(tmp_path, *argv)
    assert (ran.code, ran.out, "--in-place" in ran.err) == (2, "", True)
    assert not (tmp_path / "runs").exists()

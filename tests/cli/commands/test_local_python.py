"""`launch local` with the Python of another environment: which one is chosen, what runs under it, what is refused."""

from __future__ import annotations

import json
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.services.local import on_host
from launcher.services.local.supervisor import Ended
from tests.command import Ran, launch
from tests.e2e.running import only_run, run
from tests.supervised import supervise_here

HEAD = "name: mine\nmachine: {type: l4, gpus: 2}\n"
SCRIPT = """\
import os, sys
import only_there
from pathlib import Path

print("ran under", sys.prefix, only_there.WHERE, flush=True)
process = os.getpid()
while process > 1:
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\\0")
    if b"launcher" in words or any(word.endswith(b"/launch") for word in words):
        break
    print("process", b" ".join(words).decode(), flush=True)
    process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
"""


def environment(folder: Path, *, packages: bool = True, **installed: str) -> Path:
    """Make a virtual environment with a module that exists only there, and return its Python. It has the packages of
    this one (`packages`), and an entry for each package in `installed`."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = next(folder.glob("lib/python3.*/site-packages"))
    (site / "only_there.py").write_text(f"WHERE = {folder.name!r}\n")
    if packages:
        (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    for name, version in installed.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


class Job:
    """A spec with a script, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "job" / "job.yaml"
        self.file.parent.mkdir()
        (self.file.parent / "main.py").write_text(SCRIPT)
        self.write("run: {script: main.py, launcher: python}\n")

    def write(self, text: str) -> None:
        self.file.write_text(HEAD + text)

    def launch(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> Ran:
        return launch("local", self.file, "--output", self.folder / "out", *argv, env=env, cwd=self.folder)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The interpreters of the jobs that were started; no process is."""
    found: list[str] = []

    def start(_job: object, *, python: str = sys.executable, **_: object) -> Ended:
        found.append(python)
        return Ended({"workerpool0-0": 1})

    supervise_here(monkeypatch)
    monkeypatch.setattr(on_host, "rehearse", start)
    return found


@pytest.mark.slow
def test_node_torchrun_and_ranks_run_under_the_named_python(tmp_path: Path, job: Job) -> None:
    python = environment(tmp_path / "theirs")
    job.write("run: {script: main.py}\nlocal: {python: ../theirs/bin/python}\n")
    ran = run("local", job.file, "--output", tmp_path / "out", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"launch: image not used: runs with {python} (local.python), Python {sys.version_info.major}." in ran.stderr
    assert ran.stderr.count(f"ran under {tmp_path / 'theirs'} theirs") == 2
    tree = [line.partition("] process ")[2] for line in ran.stderr.splitlines() if "] process " in line]
    for words in ("main.py", "torchrun_wrapper.py", "-m launch_train.node"):
        assert {line.split()[0] for line in tree if words in line} == {str(python)}, tree
    assert f'"python": "{python}"' in (only_run(tmp_path / "out") / "attempts" / "0001.json").read_text()


def test_a_program_that_the_job_starts_finds_the_same_python(tmp_path: Path, job: Job) -> None:
    """Whatever the interpreter is called, `python` and `python3` start it."""
    python = environment(tmp_path / "theirs")
    odd = python.with_name("odd name")
    odd.symlink_to(python.resolve())
    job.write("run: {command: [sh, -c, 'python main.py && python3 main.py']}\nimage: {code: .}\n")
    ran = job.launch("--python", "theirs/bin/odd name")
    assert ran.code == 0, ran.err
    assert ran.err.count(f"ran under {tmp_path / 'theirs'} theirs") == 2


def test_the_option_beats_the_spec_and_the_spec_beats_the_environment(
    tmp_path: Path, job: Job, started: list[str]
) -> None:
    a, b, c = (environment(tmp_path / name) for name in "abc")
    active = {"VIRTUAL_ENV": str(tmp_path / "c"), "CONDA_PREFIX": str(tmp_path / "a")}
    spec = "run: {script: main.py, launcher: python}\n"
    for text, argv, env, chosen in [
        (spec, [], {}, Path(sys.executable)),
        (spec, [], {"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": str(tmp_path / "a")}, Path(sys.executable)),
        (spec, [], {"CONDA_PREFIX": str(tmp_path / "a")}, a),
        (spec, [], active, c),
        (spec + "local: {python: ../b/bin/python}\n", [], active, b),
        (spec + "local: {python: ../b/bin/python}\n", ["--python", "a/bin/python"], active, a),
        (spec, ["--set", f"local.python={b}"], active, b),
    ]:
        job.write(text)
        ran = job.launch("--new", *argv, env=env)
        assert started[-1] == str(chosen), ran.err
        assert f"runs with {chosen} (" in ran.err
        page = job.launch("--dry-run", *argv, env=env).out
        assert ("\npython    " in page) is (chosen != Path(sys.executable))
        assert chosen == Path(sys.executable) or str(chosen) in page.replace("\n          ", "")


def test_neither_the_request_nor_the_run_id_names_it(tmp_path: Path, job: Job) -> None:
    environment(tmp_path / "a")
    spec = "run: {script: main.py, launcher: python}\n"
    plans = []
    for text, argv in [
        (spec, []),
        (spec + "local: {python: ../a/bin/python}\n", []),
        (spec, ["--python", "a/bin/python"]),
    ]:
        job.write(text)
        shown = json.loads(job.launch("--dry-run", "-o", "json", *argv).out)
        plans.append({**shown, "warnings": []})
        cloud = launch("vertex", job.file, "--region", "us-central1", "--dry-run", "-o", "json")
        plans[-1]["cloud"] = json.loads(cloud.out)
    assert plans[0] == plans[1] == plans[2]


def test_a_run_keeps_its_python(tmp_path: Path, job: Job, started: list[str]) -> None:
    """With the same command in another shell, with --resume, and with --resume alone; another one must be named."""
    a, b = environment(tmp_path / "a"), environment(tmp_path / "b")
    job.launch("--python", "a/bin/python")
    run_id = only_run(tmp_path / "out").name
    again = job.launch(env={"VIRTUAL_ENV": str(tmp_path / "b")})
    assert f"runs with {a} (as in an earlier attempt; --python chooses another), Python" in again.err
    path = tmp_path / "out" / run_id
    launch("local", job.file, "--resume", path, cwd=tmp_path)
    assert started == [str(a)] * 3
    job.launch("--python", "b/bin/python")
    launch("local", job.file, "--resume", path, cwd=tmp_path)
    assert started[3:] == [str(b)] * 2
    job.launch("--new", env={})
    assert started[-1] == sys.executable
    b.unlink()
    job.launch("--run-id", run_id)
    assert started[-1] == sys.executable, "what no longer exists can't be used again"


def test_the_setup_runs_in_the_python_of_the_job(tmp_path: Path, job: Job, started: list[str]) -> None:
    """What its lines install is seen, and an earlier attempt's environment is the one that they change."""
    site = next((environment(tmp_path / "a").parent.parent).glob("lib/python3.*/site-packages"))
    (job.file.parent / "main.py").write_text("import installed_later\n")
    job.write(
        'run: {script: main.py, launcher: python}\nimage: {setup: ["cd $(dirname $(command -v python))/../lib/*/'
        'site-packages && touch installed_later.py"]}\n'
    )
    assert "imports installed_later" in job.launch("--python", "a/bin/python").err
    ran = job.launch("--setup")
    assert (site / "installed_later.py").exists()
    assert "imports installed_later" not in ran.err
    assert started == [str(tmp_path / "a" / "bin" / "python")] * 2


def test_a_resume_without_the_spec_keeps_the_python(tmp_path: Path, started: list[str]) -> None:
    a = environment(tmp_path / "a")
    launch("local", "--python", a, "--output", tmp_path / "out", cwd=tmp_path)
    launch("local", "--resume", only_run(tmp_path / "out"), cwd=tmp_path)
    assert started == [str(a)] * 2


@pytest.mark.slow
def test_each_point_of_a_sweep_runs_under_it(tmp_path: Path, job: Job) -> None:
    environment(tmp_path / "a")
    (job.file.parent / "main.py").write_text("import only_there\n")
    job.write("run: {script: main.py, launcher: python}\n")
    argv = ("sweep", job.file, "--to", "local", "--output", tmp_path / "out", "--set", "env.A=1,2")
    refused = run(*argv, "--set", "local.python=../none", cwd=tmp_path)
    assert (refused.returncode, "none does not exist" in refused.stderr) == (2, True), refused.stderr
    ran = run(*argv, "--set", "local.python=../a/bin/python", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ran = run(*argv, "--set", "env.B=1", cwd=tmp_path, env={"VIRTUAL_ENV": str(tmp_path / "a")})
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_request_from_a_file_runs_under_it(tmp_path: Path, job: Job, started: list[str]) -> None:
    a = environment(tmp_path / "a")
    body = json.loads(job.launch("--dry-run", "-o", "json").out)["attempts"][0]["request"]
    (tmp_path / "request.json").write_text(json.dumps(body))
    launch("local", "--request", tmp_path / "request.json", "--python", a, cwd=tmp_path)
    launch("local", "--request", tmp_path / "request.json", cwd=tmp_path)
    assert started == [str(a)] * 2
    (tmp_path / "none").mkdir()
    ran = launch("local", "--request", tmp_path / "request.json", "--python", tmp_path / "none", cwd=tmp_path)
    assert (ran.code, f"{tmp_path / 'none'} is a folder" in ran.err) == (2, True), ran.err


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


TORCHRUN = "run: {script: main.py}\n"


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("none/bin/python", "/none/bin/python does not exist", "python3 -m venv PLACE/none"),
        ("venv", "PLACE/venv is a folder", "Name its Python: PLACE/venv/bin/python"),
        ("text", "PLACE/text is not a working Python: ", "PLACE/text -VV"),
        ("data", "PLACE/data can't be started: Permission denied", "Name a Python"),
        ("old", "PLACE/old is Python 3.9.2; launch needs 3.10 or newer", "python3.12 -m venv .venv"),
        (
            "bare/bin/python",
            "PLACE/bare/bin/python has no torch, which torchrun (run.launcher: python starts one process without it) "
            "needs",
            "uv pip install --python PLACE/bare/bin/python torch==2.13.0",
        ),
        (
            "dated/bin/python",
            "PLACE/dated/bin/python has torch 1.13.1+cpu; torchrun (run.launcher: python starts one process without "
            "it) needs 2.1.0 or newer",
            "PLACE/dated/bin/python -m pip install torch==2.13.0",
        ),
    ],
)
def test_a_python_that_cannot_run_the_job_is_refused_before_anything_starts(
    tmp_path: Path, job: Job, started: list[str], name: str, words: str, fix: str
) -> None:
    environment(tmp_path / "venv")
    environment(tmp_path / "bare", packages=False)
    environment(tmp_path / "dated", packages=False, torch="1.13.1+cpu", pip="25.0")
    script(tmp_path / "text", "#!/bin/sh\necho this is no Python\n")
    script(tmp_path / "old", "#!/bin/sh\necho '[[3, 9, 2], {}, []]'\n")
    script(tmp_path / "data", "").chmod(0o644)
    cases: list[tuple[str, list[str | Path], str]] = [
        (TORCHRUN, ["--python", tmp_path / name], "--python: "),
        (TORCHRUN + f"local: {{python: ../{name}}}\n", [], f"{job.file}:4: local.python: "),
    ]
    for text, argv, where in cases:
        job.write(text)
        ran = job.launch(*argv)
        assert (ran.code, ran.out, started) == (2, "", [])
        assert ran.err.replace(f"{tmp_path}/job/../", f"{tmp_path}/").startswith(f"error: {where}"), ran.err
        shown = ran.err.replace(str(tmp_path), "PLACE")
        assert words in shown, ran.err
        assert fix in shown, ran.err
        assert not (tmp_path / "out").exists()
        assert job.launch("--dry-run", *argv).code == 0, "a plan can be read everywhere"


def test_an_active_environment_that_cannot_run_the_job_is_left_alone(
    tmp_path: Path, job: Job, started: list[str]
) -> None:
    environment(tmp_path / "bare", packages=False)
    active = {"VIRTUAL_ENV": str(tmp_path / "bare")}
    job.write(TORCHRUN)
    ran = job.launch("--new", env=active)
    assert f"the environment of VIRTUAL_ENV is not used: {tmp_path}/bare/bin/python has no torch" in ran.err
    assert started.pop() == sys.executable
    assert "VIRTUAL_ENV" in job.launch("--dry-run", env=active).out
    job.write("run: {script: main.py, launcher: python}\n")
    job.launch("--new", env=active)
    assert started.pop() == str(tmp_path / "bare" / "bin" / "python"), "one process needs no torch"
    job.launch("--new", env={"VIRTUAL_ENV": str(tmp_path / "gone")})
    assert started.pop() == sys.executable


def test_the_built_in_trainer_and_buckets_need_packages_of_launch(tmp_path: Path, started: list[str]) -> None:
    python = environment(tmp_path / "a", packages=False, torch="2.9.1", pip="25.0")
    ran = launch("local", "--python", python, "--output", tmp_path / "out", cwd=tmp_path)
    assert "has torch 2.9.1; the built-in trainer needs 2.13 or newer" in ran.err
    python = environment(tmp_path / "b", packages=False, torch="2.13.0", pip="25.0")
    ran = launch("local", "--python", python, "--output", tmp_path / "out", cwd=tmp_path)
    assert "has no numpy, which the built-in trainer needs" in ran.err
    python = environment(tmp_path / "c", packages=False, torch="2.13.0", numpy="2.4.0", pip="25.0")
    ran = launch("local", "--python", python, "--output", "gs://bucket/runs", cwd=tmp_path)
    assert "has no google-cloud-storage, which output: gs://bucket/runs needs" in ran.err
    assert f"{python} -m pip install google-cloud-storage" in ran.err
    assert started == []


def test_the_image_has_its_own_python(job: Job) -> None:
    ran = job.launch("--docker", "--python", sys.executable)
    assert (ran.code, "--python cannot be combined with --docker" in ran.err) == (2, True)


def test_warnings_about_packages_look_at_the_python_that_runs_the_job(tmp_path: Path, job: Job) -> None:
    def warnings(*argv: str) -> list[str]:
        found: list[str] = json.loads(job.launch("--dry-run", "-o", "json", *argv).out)["warnings"]
        return found

    python = environment(tmp_path / "a", packages=False, einops="0.8", pip="25.0")
    (job.file.parent / "main.py").write_text("import json, only_there, einops_is_not_there\n")
    (job.file.parent / "needs.txt").write_text("einops\nrich>=13\ntyper; sys_platform == 'win32'\n")
    assert warnings() == [
        f"main.py:1: imports only_there, and it is not installed in {sys.executable}",
        f"main.py:1: imports einops_is_not_there, and it is not installed in {sys.executable}",
    ]
    assert warnings("--python", str(python)) == [
        f"main.py:1: imports einops_is_not_there, and it is not installed in {python}"
    ]
    job.write("run: {script: main.py, launcher: python}\nimage: {requirements: needs.txt}\n")
    assert warnings("--python", str(python))[1:] == [
        f"image.requirements: not installed in {python}: rich. To install: {python} -m pip install "
        f"-r {job.file.parent / 'needs.txt'}"
    ]
    job.write("run: {module: only_there, launcher: python}\nimage: {code: .}\n")
    assert warnings("--python", str(python)) == []
    refused = job.launch("--dry-run")
    assert (refused.code, f"only_there is not installed in {sys.executable}" in refused.err) == (2, True)
    job.write(f"run: {{module: only_there, launcher: python}}\nimage: {{code: .}}\nlocal: {{python: {python}}}\n")
    assert launch("check", job.file, "--target", "local").code == 0


@pytest.mark.parametrize(("version", "lacking"), [((3, 10, 2), "old"), ((3, 13, 2), "new")])
def test_markers_of_requirements_are_those_of_the_python_that_runs_the_job(
    tmp_path: Path, job: Job, version: tuple[int, ...], lacking: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps([version, {'pip': '25.0'}, []])}'\n")
    python.chmod(0o755)
    (job.file.parent / "needs.txt").write_text("old; python_version < '3.12'\nnew; python_version >= '3.12'\n")
    job.write("run: {script: main.py, launcher: python}\nimage: {requirements: needs.txt}\n")
    (line,) = json.loads(job.launch("--dry-run", "-o", "json", "--python", python).out)["warnings"]
    assert f"not installed in {python}: {lacking}. To install" in line


def test_a_command_that_is_not_found_is_refused_before_anything_starts(
    tmp_path: Path, job: Job, started: list[str]
) -> None:
    python = environment(tmp_path / "a")
    folder = job.file.parent
    refusals: list[tuple[str, list[str | Path], str]] = [
        ("deepspeed", [], f"command not found: deepspeed; it is neither in {Path(sys.executable).parent} nor on PATH"),
        (
            "deepspeed",
            ["--python", python],
            f"neither in {python.parent} nor on PATH\nInstall it, or name",
        ),
        ("no-such-program", ["--in-place"], "Install it, or name the environment that has it: --python"),
        ("./none.sh", [], "run.command: ./none.sh is not in the code"),
        ("./plain.sh", [], "run.command: ./plain.sh is not executable"),
        (str(tmp_path / "none"), [], f"command not found: {tmp_path / 'none'}"),
    ]
    for command, argv, words in refusals:
        (folder / "plain.sh").write_text("echo")
        job.write(f"run: {{command: [{command}, main.py]}}\nimage: {{code: .}}\n")
        ran = job.launch(*argv)
        assert (ran.code, words in ran.err, started) == (2, True, []), ran.err
    assert not (tmp_path / "out").exists()
    script(folder / "run.sh", "#!/bin/sh\n")
    script(python.with_name("theirs"), "#!/bin/sh\n")
    (folder / "pyproject.toml").write_text(
        "[project]\nname = 'main'\nversion = '1'\nscripts = {own-program = 'main:run'}\n"
    )
    for number, command in enumerate(["./run.sh", "theirs", "own-program", "python", "sh", str(folder / "run.sh")]):
        job.write(f"run: {{command: [{command}, {number}]}}\nimage: {{code: .}}\n")
        ran = job.launch("--python", python)
        assert len(started) == number + 1, ran.err
    job.write(f"run: {{command: [theirs]}}\nenv: {{PATH: '{tmp_path}:/bin'}}\nimage: {{code: .}}\n")
    assert "command not found: theirs" in job.launch("--python", python).err
    request = json.loads(job.launch("--dry-run", "-o", "json").out)["attempts"][0]["request"]
    (tmp_path / "request.json").write_text(json.dumps(request))
    ran = launch("local", "--request", tmp_path / "request.json", "--code", folder, cwd=tmp_path)
    assert (ran.code, "command not found: theirs" in ran.err) == (2, True), ran.err


def test_a_script_may_import_main_and_a_home_folder_is_expanded(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import __main__\n")
    spec = "machine: {type: l4}\nrun: {script: t.py, launcher: python}\nlocal: {python: ~/nowhere/bin/python}\n"
    (tmp_path / "job.yaml").write_text(spec)
    ran = launch("local", "job.yaml", "--dry-run", cwd=tmp_path, env={"HOME": str(tmp_path)})
    text = "".join((ran.out + ran.err).split())
    assert f"{tmp_path}/nowhere/bin/python" in text
    assert "~" not in text
    (tmp_path / "job.yaml").write_text(spec.partition("local:")[0])
    assert launch("local", "job.yaml", "--dry-run", cwd=tmp_path).code == 0

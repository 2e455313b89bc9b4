"""What a newcomer types wrongly: each error names its cause and what to type next, in 80 columns."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch_train.common.storage import LocalFolder
from launcher.services.local.attempts import lock
from tests.cli.flows.test_local_runs import NO_CLOUD
from tests.command import launch

SPEC = "name: job\nmachine: {type: l4, gpus: 1}\nrun: {command: [python, -c, print(1)]}\n"


class Terminal(io.StringIO):
    """A stream that is a terminal, so that messages are wrapped."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.command.io", SimpleNamespace(StringIO=Terminal))
    (tmp_path / "job.yaml").write_text(SPEC)
    for name, text in {
        "tabs.yaml": SPEC.replace("machine: ", "machine:\n\t"),
        "empty.yaml": "",
        "utf16.yaml": SPEC,
        "nodes.yaml": SPEC.replace("gpus: 1", "gpus: 99"),
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-16" if name.startswith("utf") else "utf-8")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "quick-0123abcd").mkdir(parents=True)
    lock(LocalFolder(tmp_path / "runs" / "quick-0123abcd"), {})
    return tmp_path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("runs --state foo", ["no state 'foo'", "Use queued"]),
        ("runs --state runing", ["Did you mean running?"]),
        ("runs --folder nowhere", ["nowhere is not a folder"]),
        ("rm", ["error: missing argument 'RUN…'", "launch rm --help"]),
        ("nosuch", ["error: no such command 'nosuch'", "launch --help"]),
        ("vertex --gpuz 2", ["error: launch vertex has no option --gpuz", "Did you mean --gpus?"]),
        (
            "vertex --gpus two",
            ["error: invalid value for '--gpus': 'two' is not a whole number", "launch vertex --help"],
        ),
        ("status --region", ["error: option '--region' requires an argument", "launch status --help"]),
        ("runs extra", ["error: unexpected argument (extra)", "launch runs --help"]),
        ("vm stop", ["error: missing argument 'NAME'", "launch vm stop --help"]),
        ("rm nothing", ["no run nothing", "launch runs lists the runs", "gcloud config set project"]),
        ("status quikc", ["no run quikc", "Did you mean quick?"]),
        ("status quick-0123abce", ["Did you mean quick-0123abcd?"]),
        ("rm runs", ["runs/quick-0123abcd"]),
        ("compare A", ["only one run", "launch compare RUN RUN"]),
        ("report nothing", ["no run nothing", "launch runs lists the runs"]),
        ("watch unknown", ["no run unknown", "launch runs lists the runs"]),
        ("sweep job.yaml", ["nothing to sweep", "--set run.config"]),
        ("check empty", ["no spec found in empty", "launch init"]),
        ("vertex --type h1000 --dry-run", ["unknown GPU or machine type h1000", "Did you mean h100"]),
        ("vertex job.yaml --dry-run", ["no Google Cloud project is set", "gcloud config set project"]),
        ("gpus --type foo", ["unknown GPU", "a3-highgpu-2g"]),
        ("init job.yaml", ["already exists", "launch init job-2.yaml"]),
        ("init empty", ["already exists", "job.yaml"]),
        ("init no/such/job.yaml", ["cannot write", "a folder that exists"]),
        ("local jbo.yaml", ["no such file", "did you mean job.yaml?"]),
        ("local tabs.yaml", ["tabs.yaml:3", "indent with spaces"]),
        ("local empty.yaml", ["the file is empty", "launch init"]),
        ("local utf16.yaml", ["save the file as UTF-8"]),
        ("local folder.yaml", ["is a folder", "launch init"]),
        ("local --request nope.json", ["cannot read --request nope.json: No such file", "-o json"]),
        ("local --request job.yaml", ["as JSON", "-o json"]),
        ("config nofile.yaml", ["no such file"]),
        ("estimate --vram foo", ["'foo'", "--vram 24GB"]),
    ],
)
def test_an_error_names_its_cause_and_what_to_type_next(folder: Path, line: str, words: list[str]) -> None:
    ran = launch(*line.split(), cwd=folder, env=NO_CLOUD)
    assert (ran.code, "Traceback" in ran.err) == (2, False), ran.shown
    text = " ".join(ran.err.split())
    assert [word for word in words if word not in text] == []
    assert ran.err.startswith("error: ")
    assert max(map(len, ran.err.splitlines())) <= 80


@pytest.mark.parametrize("text", [SPEC.replace("\n", "\r\n"), f"\ufeff{SPEC}"])
def test_line_ends_and_byte_order_marks_of_windows_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_bytes(text.encode())
    assert launch("check", "job.yaml", cwd=tmp_path).code == 0


def test_a_wrapped_hint_keeps_its_indentation(folder: Path) -> None:
    lines = launch("local", "nodes.yaml", cwd=folder).err.splitlines()
    assert lines[0].startswith("error: nodes.yaml:2: machine.gpus")
    assert all(line.startswith("    ") for line in lines[1:])
    assert len(lines) > 2


def test_messages_of_launch_fit_the_terminal(folder: Path) -> None:
    ran = launch("runs", cwd=folder, env=NO_CLOUD)
    assert "gcloud config set project" in " ".join(ran.err.replace("launch: ", "").split())
    assert max(map(len, ran.err.splitlines())) <= 80


def test_the_next_commands_of_init_fit_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.cli.flows.suggestions.shutil.which", lambda name: name)
    assert max(map(len, launch("init", cwd=tmp_path, env=NO_CLOUD).out.splitlines())) <= 80

"""What torchrun's failures come to on the terminal."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch_train.common import contract
from launch_train.node import torchrun_wrapper

NONE = "<N/A>"
"""torch's name for no error file."""


def failed(**codes: int) -> ChildFailedError:
    """Of ranks `r0`, `r1` …, in the order of their ends."""
    failures = {}
    for seconds, (name, code) in enumerate(codes.items()):
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=NONE)
        failure.timestamp = seconds
        failures[int(name[1:])] = failure
    return ChildFailedError("work.py", failures)


@pytest.mark.parametrize(
    ("codes", "lines"),
    [
        ({"r1": 1, "r0": -15}, ["rank 1 failed first: exit code 1"]),
        ({"r1": -11, "r0": 1}, ["rank 1 failed first: SIGSEGV (crash in native code)"]),
        ({"r0": -12}, ["rank 0 failed first: SIGUSR2"]),
        (
            {"r3": -9, "r0": -15, "r2": -9},
            [
                "rank 3 failed first: SIGKILL (out of memory?)",
                "rank 2 failed too: SIGKILL (out of memory?)",
            ],
        ),
        ({"r0": 2, "r1": -15}, []),  # it has said why: see the exit file below
    ],
)
def test_the_first_rank_is_named_unless_it_has_said_why(
    codes: dict[str, int], lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / "exit").write_text("2\n")
    assert list(torchrun_wrapper.failure_lines(failed(**codes), str(tmp_path / "exit"))) == lines


def test_without_an_exit_file_every_failure_is_named(tmp_path: Path) -> None:
    for missing in ("", str(tmp_path / "none")):
        assert list(torchrun_wrapper.failure_lines(failed(r0=2), missing)) == ["rank 0 failed first: exit code 2"]


def test_the_exit_file_is_the_contracts() -> None:
    assert torchrun_wrapper.EXIT_FILE == contract.EXIT_FILE


def test_a_line_of_a_signal_fits_80_columns_behind_its_replicas_name() -> None:
    for name, words in torchrun_wrapper.MEANINGS.items():
        assert len(f"[workerpool0-0] launch: rank 7 failed first: {name} ({words})") <= 80


def test_the_loggers_that_are_quiet_are_torchs() -> None:
    for name in torchrun_wrapper.QUIET:
        assert importlib.import_module(name).logger.name == name


def test_an_older_torch_is_not_told_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no --shutdown-timeout; it waits as long all the same. A script may have such an option."""
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 30))
    script = ["-m", "--", "launch_train", "--shutdown-timeout=1"]
    known, argv = ArgumentParser(), ["--nnodes=1", "--shutdown-timeout=18", *script]
    known.add_argument("--shutdown-timeout")
    assert torchrun_wrapper._supported_arguments(argv, known) == argv
    assert PContext.close.__defaults__ == (None, 30)
    assert torchrun_wrapper._supported_arguments(argv, ArgumentParser()) == ["--nnodes=1", *script]
    assert PContext.close.__defaults__ == (None, 18)

"""A run that was stopped and goes on is the same run, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train import checkpoint, runfolder
from launch_train.checkpointing import lease, resume_loader, rng_state
from launch_train.checkpointing import manifest as manifests
from launch_train.common.config import as_data, parse
from launch_train.common.errors import OutOfMemoryError, PreemptedError, SupersededError, UsageError
from launch_train.common.storage import LocalFolder
from launch_train.distributed import process_group
from launch_train.telemetry import metric_sink
from launch_train.trainer import resume
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run
from tests.train import trials
from tests.train.trials import STEPS, differences, in_a_child, losses, preempted, read, train, waiting_for_saves

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    torch.set_num_threads(1)
    train(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 4, 5, 6, 7, 9, 10, 13, 20, STEPS - 2])
def test_a_sigterm_at_any_step_changes_no_bit(whole: Path, tmp_path: Path, step: int) -> None:
    """Around blocks of rows, evaluations, and the end of the warm-up."""
    preempted(tmp_path / "run", step)
    done = read(tmp_path / "run").event("preempted")
    assert done is not None
    assert done["step"] == step + 1
    train(tmp_path / "run", generation=1)
    assert losses(tmp_path / "run") == losses(whole)
    assert differences(whole, tmp_path / "run") == set()


def test_preempted_again_and_again(whole: Path, tmp_path: Path) -> None:
    for generation, step in enumerate((0, 1, 2, 7, 13, 14)):
        preempted(tmp_path / "run", step, generation)
    train(tmp_path / "run", generation=6)
    assert losses(tmp_path / "run") == losses(whole)
    assert differences(whole, tmp_path / "run") == set()
    assert checkpoint.load(str(tmp_path / "run"))["loop"]["interruptions"] == 6


def test_a_second_sigterm_during_the_save_changes_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manifests.commit

    def commit(*args: Any) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        real(*args)

    monkeypatch.setattr(manifests, "commit", commit)
    preempted(tmp_path / "run", 9)
    monkeypatch.undo()
    train(tmp_path / "run", generation=1)
    assert differences(whole, tmp_path / "run") == set()


def test_a_sigterm_in_the_last_save_changes_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manifests.commit

    def commit(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(*args)

    monkeypatch.setattr(manifests, "commit", commit)
    train(tmp_path / "run")
    assert read(tmp_path / "run").event("end") is not None
    assert differences(whole, tmp_path / "run") == set()


def test_a_sigterm_in_an_evaluation_begins_it_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = process_group.broadcast_buffers

    def told(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(*args)

    monkeypatch.setattr("launch_train.trainer.train.broadcast_buffers", told)
    with pytest.raises(PreemptedError):
        train(tmp_path / "run")
    monkeypatch.undo()
    assert read(tmp_path / "run").event("eval") is None
    assert checkpoint.load(str(tmp_path / "run"))["loop"]["eval_due"]
    train(tmp_path / "run", generation=1)
    assert [one["step"] for one in read(tmp_path / "run").events if one["event"] == "eval"] == [7, 14, 21, 24]
    assert differences(whole, tmp_path / "run") == set()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of one noisy run: whole, and stopped half-way."""
    base = tmp_path_factory.mktemp("noisy")
    torch.set_num_threads(1)
    with trials.noisy_and_scaled():
        train(base / "whole")
        preempted(base / "half", 17)
    return base


def test_a_noisy_run_goes_on_as_it_was(noisy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(noisy / "half", tmp_path / "run")
    with trials.noisy_and_scaled():
        train(folder, generation=1)
    assert differences(noisy / "whole", folder) == set()


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        *((name, None) for name in ("model", "optimizer", "scaler", "metrics", "loop")),
        *(("loop", key) for key in ("step", "samples")),
        *(("metrics", key) for key in ("first", "last")),
        *(("random", key) for key in ("python", "numpy", "torch")),
    ],
)
def test_every_entry_of_the_state_counts(
    noisy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, key: str | None
) -> None:
    """Resumed without one of them, the run ends otherwise than the one that nobody disturbed."""
    folder = shutil.copytree(noisy / "half", tmp_path / "run")
    _forget(monkeypatch, entry, key)
    with trials.noisy_and_scaled():
        train(folder, generation=1)
    assert differences(noisy / "whole", folder)


@pytest.mark.parametrize("forgotten", [None, "eval_due", "eval_loss"])
def test_what_the_state_says_of_evaluations_counts(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str | None
) -> None:
    """Stopped just before the last evaluation (one is due), or just after it (its loss is known)."""
    folder, real = tmp_path / "run", process_group.mean
    if forgotten == "eval_loss":

        def told(*args: Any) -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(*args)

        monkeypatch.setattr("launch_train.performance.loss_normalization.mean", told)
        with pytest.raises(PreemptedError):
            train(folder, eval={"every": STEPS, "batches": 2})
        monkeypatch.undo()
    else:
        preempted(folder, STEPS - 1)
    if forgotten:
        _forget(monkeypatch, "loop", forgotten)
    train(folder, generation=1)
    ended, expected = read(folder).event("end"), read(whole).event("end")
    assert ended is not None
    assert expected is not None
    assert (ended["eval_loss"] == expected["eval_loss"]) == (forgotten is None)


def _forget(monkeypatch: pytest.MonkeyPatch, entry: str, key: str | None) -> None:
    if entry == "random":
        real = rng_state.restore_generators
        fresh = rng_state.read_generators(torch.device("cpu"))
        monkeypatch.setattr(
            rng_state, "restore_generators", lambda old, device: real({**old, str(key): fresh[str(key)]}, device)
        )
        return
    restore = resume.restore_state

    def without(run: Any, state: Any) -> None:
        now = resume.read_state(run)[entry]
        restore(run, {**state, entry: now if key is None else {**state[entry], key: now[key]}})

    monkeypatch.setattr(resume, "restore_state", without)


@pytest.mark.parametrize(
    ("kind", "number", "after"),
    [
        *(("take", 1, after) for after in (False, True)),
        *(("part", number, True) for number in (1, 3)),
        *((kind, number, True) for kind in ("manifest", "point", "delete") for number in (1, 2)),
    ],
)
def test_a_killed_save_is_as_if_it_had_never_begun_or_is_whole(
    whole: Path, tmp_path: Path, kind: str, number: int, after: bool
) -> None:
    """SIGKILL after each kind of effect that a save has on the run folder, which is before the next one."""
    often = {"checkpoint": {"minutes": 1e-6, "keep": {"last": 1}}}
    in_a_child(tmp_path / "run", 0, (kind, number, after), often)
    in_a_child(tmp_path / "run", 1, None, often)
    assert differences(whole, tmp_path / "run") == set()
    assert losses(tmp_path / "run") == losses(whole)


def test_keep_leaves_the_last_and_every_so_many(tmp_path: Path) -> None:
    train(tmp_path / "run", checkpoint={"minutes": 1e-6, "keep": {"last": 2, "every": 10}})
    names = LocalFolder(tmp_path / "run").list("checkpoints/")
    steps = sorted({int(match["step"]) for name in names if (match := runfolder.MANIFEST.match(name))})
    assert steps[-1] == STEPS
    assert all(step % 10 == 0 for step in steps[:-2])


def test_a_run_that_had_ended_does_nothing_but_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    before = set(LocalFolder(tmp_path / "run").list("checkpoints/step"))
    end = read(tmp_path / "run").event("end")
    train(tmp_path / "run", generation=1)
    assert "nothing to do" in capsys.readouterr().out
    again = read(tmp_path / "run").event("end")
    assert end is not None
    assert again is not None
    same = ("parameters_sha256", "train_loss_first", "train_loss_last", "eval_loss", "step", "tokens_per_s")
    assert [end[key] for key in same] == [again[key] for key in same]
    assert set(LocalFolder(tmp_path / "run").list("checkpoints/step")) == before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 16}, "batch_size was 8 and is 16"),
        ({"seed": 2}, "seed was 1337 and is 2"),
        ({"steps": 12}, "steps was 24 and is 12"),
        ({"optimizer": {"lr": 2e-2, "warmup_steps": 10}}, "optimizer was {name: adamw, lr: 0.01"),
        ({"model": {**trials.CONFIG["model"], "n_layer": 2}}, "model was {name: gpt, n_layer: 1"),
    ],
)
def test_a_folder_of_another_spec_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    preempted(tmp_path / "run", 3)
    with pytest.raises(UsageError) as refused:
        train(tmp_path / "run", generation=1, **changed)
    assert "belongs to another spec" in str(refused.value)
    assert words in str(refused.value)
    assert "--new" in str(refused.value)


def test_a_refused_start_writes_nothing_and_starts_no_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to another run: its rows, its samples of the machine and its W&B run do too."""
    preempted(tmp_path / "run", 3)
    monkeypatch.setattr(metric_sink, "LoggerProcess", None)
    before, threads = contents(tmp_path / "run"), set(threading.enumerate())
    with pytest.raises(UsageError, match="seed"):
        train(tmp_path / "run", generation=1, seed=2, loggers=["wandb"])
    assert not set(threading.enumerate()) - threads
    assert contents(tmp_path / "run") == before


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run folder, by name."""
    return {name: (folder / name).read_bytes() for name in LocalFolder(folder).list("")}


def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one and two and three " * 100)
    preempted(tmp_path / "run", 3, data=str(text))
    text.write_text("one and two and three, " * 100)
    with pytest.raises(UsageError, match="other content"):
        train(tmp_path / "run", generation=1, data=str(text))


def test_the_same_data_elsewhere_is_the_same_data(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).write_text("one and two and three " * 100)
    preempted(tmp_path / "run", 3, data=str(tmp_path / "here"))
    train(tmp_path / "run", generation=1, data=str(tmp_path / "there"))


def test_other_kernels_go_on_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of this start: what the checkpoint says of them, torch would take over."""
    used: list[tuple[bool, bool]] = []

    def kernels(run: Run) -> None:
        (group, *_) = run.optimizer.param_groups
        used.append((group["fused"], group["foreach"]))

    preempted(tmp_path / "run", 3)
    slow = {**trials.CONFIG["optimizer"], "fused": False}
    with waiting_for_saves(kernels):
        train(tmp_path / "run", generation=1, optimizer=slow, attention="math")
    assert set(used) == {(False, True)}
    said = capsys.readouterr().out
    assert "attention: auto before, math now: same global batch" in said
    assert "optimizer.fused: auto before, false now: same global batch" in said


def test_a_checkpoint_from_before_a_setting_was_there_is_the_same_spec() -> None:
    now = as_data(parse(trials.CONFIG))
    before = {key: value for key, value in now.items() if key != "attention"}
    before["optimizer"] = {key: value for key, value in now["optimizer"].items() if key != "fused"}
    before["data"] = {key: value for key, value in now["data"].items() if value is not None}
    before = json.loads(json.dumps(before))
    resume_loader.require_same_run({"config": before}, {"config": now}, "gs://b/runs/a")
    assert resume_loader.describe_changes({"config": before}, {"config": now}) == []


def test_another_micro_batch_goes_on_and_says_so(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm: dict[str, Any] = {"model": {**trials.CONFIG["model"], "dropout": 0.0}}
    train(tmp_path / "whole", **calm)
    preempted(tmp_path / "run", 11, **calm)
    capsys.readouterr()
    train(tmp_path / "run", generation=1, micro_batch_size=4, **calm)
    assert "samples in a micro-batch: 2 before, 4 now: same global batch" in capsys.readouterr().out
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-4)


def test_a_checkpoint_of_a_newer_format_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FORMAT", 2)
    preempted(tmp_path / "run", 3)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="format 2, this one reads 1"):
        train(tmp_path / "run", generation=1)


def test_an_older_start_that_is_still_alive_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start takes the folder over while the first trains: the first ends at its next checkpoint."""
    folder = tmp_path / "run"
    real = loop.train_step

    def train_step(run: Any) -> None:
        real(run)
        if run.state["step"] == 5:
            lease.Lease(LocalFolder(folder), "0001-0007")

    monkeypatch.setattr(loop, "train_step", train_step)
    with pytest.raises(SupersededError, match="attempt 0001, generation 0007 has taken over this run"):
        train(folder)
    assert not [name for name in LocalFolder(folder).list("checkpoints/") if runfolder.MANIFEST.match(name)]


def test_a_start_that_comes_too_late_leaves(tmp_path: Path) -> None:
    preempted(tmp_path / "run", 3, generation=4)
    with pytest.raises(SupersededError, match="generation 0004"):
        train(tmp_path / "run", generation=3)
    with pytest.raises(SupersededError, match="as the same start"):
        train(tmp_path / "run", generation=4)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["flip", "truncate", "missing", "manifest"])
def test_a_broken_checkpoint_is_passed_over_for_the_one_before(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    folder = tmp_path / "run"
    preempted(folder, 5)
    preempted(folder, 11, generation=1)
    (manifest,) = folder.glob("checkpoints/step-00000012/*/manifest.json")
    (part,) = manifest.parent.glob("*.part")
    if harm == "missing":
        part.unlink()
    else:
        broken = manifest if harm == "manifest" else part
        data = bytearray(broken.read_bytes())
        data[len(data) // 2] ^= 4
        broken.write_bytes(data[: -1 if harm == "truncate" else None])
    capsys.readouterr()
    train(folder, generation=2)
    out = capsys.readouterr().out
    assert "skipped a checkpoint: checkpoints/step-00000012/0001-0001/" in out
    assert "resumed from step 6" in out
    assert differences(whole, folder) == set()
    assert losses(folder) == losses(whole)


def test_without_any_whole_checkpoint_the_run_begins_again(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preempted(tmp_path / "run", 5)
    for part in (tmp_path / "run").glob("checkpoints/step-*/*/*.part"):
        part.unlink()
    train(tmp_path / "run", generation=1)
    assert "no usable checkpoint: starting from step 1" in capsys.readouterr().out
    assert differences(whole, tmp_path / "run") == set()


def test_the_time_of_all_starts_is_added_up(tmp_path: Path) -> None:
    preempted(tmp_path / "run", 5)
    first = checkpoint.load(str(tmp_path / "run"))["loop"]["seconds"]
    preempted(tmp_path / "run", 11, generation=1)
    second = checkpoint.load(str(tmp_path / "run"))["loop"]["seconds"]
    train(tmp_path / "run", generation=2)
    ended = read(tmp_path / "run").event("end")
    assert ended is not None
    assert 0 < first < second < ended["seconds"]


def test_a_fault_of_the_machine_in_a_restore_is_not_the_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted(tmp_path / "run", 3)
    monkeypatch.setattr(resume, "restore_state", lambda run, state: _fail("CUDA out of memory"))
    with pytest.raises(OutOfMemoryError, match="out of memory"):
        train(tmp_path / "run", generation=1)
    monkeypatch.setattr(resume, "restore_state", lambda run, state: run.optimizer.load_state_dict({}))
    with pytest.raises(UsageError, match="doesn't fit this code"):
        train(tmp_path / "run", generation=2)


def _fail(words: str) -> None:
    raise RuntimeError(words)


def test_preempted_before_its_last_evaluation_the_last_checkpoint_has_its_digest(tmp_path: Path) -> None:
    preempted(tmp_path / "run", STEPS - 1)
    train(tmp_path / "run", generation=1)
    ended = read(tmp_path / "run").event("end")
    newest = manifests.manifest_names(LocalFolder(tmp_path / "run"))[0]
    manifest = manifests.read(LocalFolder(tmp_path / "run"), newest)
    assert ended is not None
    assert manifest.about["parameters_sha256"] == ended["parameters_sha256"]


def test_no_copy_of_a_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    preempted(tmp_path / "run", 3)
    train(tmp_path / "run", generation=1)
    assert [path for path in (tmp_path / "tmp").iterdir() if "checkpoint" in path.name] == []

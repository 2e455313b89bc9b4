"""The samples of evaluations: what is written, that training stays as it is, and what happens if they fail."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Callable, Mapping
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from launch_train.common.config import MOST_SAMPLES, parse
from launch_train.common.errors import PreemptedError
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
from launch_train.models.gpt import GPT
from launch_train.performance.precision import choose
from launch_train.trainer import samples
from launch_train.trainer.samples import NEW_TOKENS, Sampler
from tests.train.data.test_images import folders
from tests.train.forked import Forked
from tests.train.trainer.test_determinism import CONFIG as TWO_RANKS
from tests.train.trainer.test_determinism import environment, losses
from tests.train.trainer.test_train import TINY, events, read, run, steps

pytestmark = pytest.mark.usefixtures("one_thread")

DROPOUT = {**TINY["model"], "dropout": 0.1}
RESNET = {"name": "resnet50", "width": 4, "image_size": 32, "num_classes": 4}


@pytest.fixture(autouse=True)
def unhurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and texts whose length doesn't depend on the machine's load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(samples, "SECONDS", 1000.0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"The quick brown fox jumps over the lazy dog. " * 200)
    return path


def asked(count: int, **rest: Any) -> dict[str, Any]:
    return {"steps": 6, "eval": {"every": 3, "batches": 1, "samples": count}, **rest}


def same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Whether two runs computed the same, to the last bit."""

    def computed(rows: list[dict[str, Any]]) -> Any:
        digest = events(rows, "end")[-1]["parameters_sha256"]
        by_step = {row["step"]: (row["loss"], row["grad_norm"]) for row in steps(rows)}
        return by_step, [row["loss"] for row in events(rows, "eval")], digest

    return bool(computed(first) == computed(second))


# --- Text -------------------------------------------------------------------------------------------------------------


def test_texts_are_held_out_and_continued(tmp_path: Path, text: Path) -> None:
    rows = run(tmp_path / "run", asked(3, data=str(text)))
    first, last = events(rows, "samples")
    assert ([first["step"], last["step"]], first["kind"]) == ([3, 6], "text")
    assert len(last["samples"]) == 3
    prompts = [one["prompt"] for one in last["samples"]]
    assert prompts == [one["prompt"] for one in first["samples"]]
    assert len(set(prompts)) > 1
    assert all(len(prompt) == 16 and prompt in text.read_text() for prompt in prompts), "half of a block"
    assert all(0 < len(one["text"]) <= NEW_TOKENS for one in last["samples"])
    assert [row["step"] for row in events(rows, "eval")] == [3, 6]
    again = run(tmp_path / "again", asked(3, data=str(text)))
    assert [row["samples"] for row in events(again, "samples")] == [first["samples"], last["samples"]]


def test_a_model_that_has_learnt_its_text_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 200)
    rows = run(tmp_path / "run", {"data": str(path), "steps": 60, "eval": {"every": 60, "batches": 1, "samples": 1}})
    (found,) = events(rows, "samples")
    (one,) = found["samples"]
    assert one["prompt"] + one["text"][:26] in path.read_text()
    assert len(one["text"]) == NEW_TOKENS


def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    (found, _) = events(run(tmp_path / "run", asked(1, data="synthetic")), "samples")
    assert found["kind"] == "tokens"
    numbers = [int(one) for one in found["samples"][0]["prompt"].split()]
    assert len({(after - before) % 256 for before, after in pairwise(numbers)}) == 1
    assert all(0 <= int(one) < 256 for one in found["samples"][0]["text"].split())


def sampler(config: Mapping[str, Any], source: Any = None) -> Sampler:
    parsed = parse({"data": "synthetic", **config})
    source = source or open_data(parsed, Ranks())
    return Sampler(parsed, source, choose("fp32", "cpu", None), torch.device("cpu"))


def never() -> bool:
    return False


def test_no_token_beyond_the_datas_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded vocabulary has tokens that no tokenizer knows."""
    monkeypatch.setattr(samples, "LIKELIEST", 1000)
    config = {"model": {**TINY["model"], "vocab_size": 512}, "eval": {"samples": 4}}
    made = sampler(config)
    made.source.vocab_size = 3
    found = made.take(GPT(made.config.model), 4, never)  # type: ignore[arg-type]
    assert found is not None
    assert {token for one in found["samples"] for token in one["text"].split()} == {"0", "1", "2"}


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_stop_ends_it_at_once_and_time_shortens_it(monkeypatch: pytest.MonkeyPatch, micro_batch: int) -> None:
    config = {"model": TINY["model"], "eval": {"samples": 4}}
    made = sampler(config)
    model = GPT(made.config.model)  # type: ignore[arg-type]
    calls = [0]

    def stopped() -> bool:
        calls[0] += 1
        return calls[0] > 5

    assert made.take(model, micro_batch, stopped) is None
    monkeypatch.setattr(samples, "SECONDS", 20.0)
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now.__setitem__(0, now[0] + 1.0) or now[0])
    monkeypatch.setattr(samples, "time", clock)  # threads of others read the clock too
    found = made.take(model, micro_batch, never)
    assert found is not None
    lengths = [len(one["text"].split()) for one in found["samples"]]
    assert lengths == ([18] if micro_batch == 1 else [18] * 4)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path / "tokenizer.json"
    words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "?": 2, "or": 3, "not": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path))
    return path


def test_tokens_become_words_again(tmp_path: Path, tokenizer: Path) -> None:
    text = "to be or not to be to to or " * 300
    (tmp_path / "words").write_text(text)
    rows = run(tmp_path / "run", asked(2, data={"path": str(tmp_path / "words"), "tokenizer": str(tokenizer)}))
    (found, _) = events(rows, "samples")
    assert found["kind"] == "text"
    for one in found["samples"]:
        assert one["prompt"] in text
        assert {*one["text"].split()} <= {"to", "be", "or", "not", "?"}


# --- Images -----------------------------------------------------------------------------------------------------------


def opened(picture: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(picture)))


def test_images_with_what_the_model_takes_them_for(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", asked(3, model=RESNET))
    first, last = events(rows, "samples")
    assert first["kind"] == last["kind"] == "images"
    assert [one["true"] for one in first["samples"]] == [one["true"] for one in last["samples"]]
    for one in last["samples"]:
        assert one["predicted"] in {"0", "1", "2", "3"}
        assert 0.25 <= one["probability"] <= 1
    assert len(first["thumbnails"]) == 3
    assert "thumbnails" not in last, "they are the same"
    assert opened(first["thumbnails"][0]).size == (32, 32)
    assert all(len(one) < 17_000 for one in first["thumbnails"])


def test_images_of_a_folder_have_the_names_of_their_classes(tmp_path: Path) -> None:
    root = folders(tmp_path / "animals")
    config = asked(4, model={**RESNET, "num_classes": 2}, data=str(root), loader={"workers": 0})
    rows = run(tmp_path / "run", config)
    found = events(rows, "samples")[0]
    assert len(found["samples"]) == 2, "a tenth of the images: none is shown twice"
    assert len(set(found["thumbnails"])) == 2
    assert {name for one in found["samples"] for name in (one["true"], one["predicted"])} <= {"cat", "dog"}


# --- Training stays as it is ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", [DROPOUT, RESNET], ids=["gpt", "resnet"])
def test_losses_are_the_same_bits_with_and_without(tmp_path: Path, text: Path, model: dict[str, Any]) -> None:
    config = {"model": model, "micro_batch_size": 4, **({"data": str(text)} if model is DROPOUT else {})}
    found = [run(tmp_path / str(count), asked(count, **config)) for count in (0, 3)]
    assert same(*found)
    assert [len(events(rows, "samples")) for rows in found] == [0, 2]


def test_a_resumed_run_has_the_same_bits(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted in the samples of the first evaluation: these are lost, and nothing else."""
    config = {"model": DROPOUT, "data": str(text)}
    plain = run(tmp_path / "plain", asked(0, **config))
    draw = samples.continuations

    def preempted(*given: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        torch.rand(7)
        return draw(*given)

    with monkeypatch.context() as patch:
        patch.setattr(samples, "continuations", preempted)
        with pytest.raises(PreemptedError):
            run(tmp_path / "run", asked(2, **config))
    assert events(read(tmp_path / "run"), "samples") == []
    resumed = run(tmp_path / "run", asked(2, **config), LAUNCH_ATTEMPT="2")
    assert [row["step"] for row in events(resumed, "samples")] == [6]
    assert same(plain, resumed)


@pytest.mark.slow
def test_on_two_ranks_the_first_takes_them(tmp_path: Path, forked: Forked) -> None:
    data = str(Path(json.__file__).parent)
    found = []
    for count in (0, 2):
        config = {**TWO_RANKS, "data": data, "eval": {"every": 6, "batches": 2, "samples": count}}
        done = forked(environment(tmp_path / str(count), config), 2)
        assert done.returncode == 0, done.stderr
        found.append(losses(tmp_path / str(count)))
    assert found[0][:2] == found[1][:2]
    assert found[0][2]["parameters_sha256"] == found[1][2]["parameters_sha256"]
    assert [row["step"] for row in events(read(tmp_path / "2"), "samples")] == [6, 12]


# --- What goes wrong --------------------------------------------------------------------------------------------------


def fails(*_: Any) -> Any:
    raise RuntimeError("no such thing\nat all")


def no_number(self: Any, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    logits = REAL(self, tokens, targets)
    return logits if targets is not None else logits * float("nan")


REAL = GPT.forward


@pytest.mark.parametrize(
    ("where", "name", "instead", "words"),
    [
        (samples, "open_decoder", fails, "no such thing at all"),
        (samples, "open_decoder", lambda *_: fails, "no such thing at all"),
        (GPT, "forward", no_number, "the model's outputs are not finite"),
    ],
    ids=["no tokenizer", "a tokenizer that decodes nothing", "nan"],
)
def test_an_error_costs_the_samples_alone(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: Any,
    name: str,
    instead: Callable[..., Any],
    words: str,
) -> None:
    plain = run(tmp_path / "plain", asked(0, data=str(text)))
    monkeypatch.setattr(where, name, instead)
    rows = run(tmp_path / "run", asked(2, data=str(text)))
    assert same(plain, rows)
    assert events(rows, "samples") == []
    out = capsys.readouterr().out
    assert out.count(f"no samples from here on: {words}\n") == 1


def test_data_that_a_person_can_not_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd:
        def __init__(self) -> None:
            self.facts: dict[str, Any] = {}

        def held_out(self, index: int, count: int, share: slice) -> Any:
            return {"input_ids": torch.zeros(1, 4)}, torch.zeros(1)

        def finish(self, batch: Any) -> Any:
            return batch

    made = sampler({"model": TINY["model"], "eval": {"samples": 1}}, Odd())
    assert made.take(GPT(made.config.model), 4, never) is None  # type: ignore[arg-type]
    assert "no samples from here on: the data's inputs are not rows of tokens" in capsys.readouterr().out


def test_a_model_without_samples_is_said_before_the_first_step(tmp_path: Path) -> None:
    """launch can't know that hf:bert hides tokens: transformers says so."""
    trunk = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = asked(2, model={"name": "hf:bert", "vocab_size": 64, **trunk}, data={"path": "synthetic", "block_size": 8})
    rows = run(tmp_path / "run", config)
    assert events(rows, "samples") == []
    choice = next(one for one in events(rows, "start")[0]["choices"] if one["what"] == "samples")
    assert choice["chosen"] == "none"
    assert "predicts hidden tokens" in choice["why"]


@pytest.mark.parametrize("name", ["hf:llama", "hf:vit"])
def test_models_of_transformers(tmp_path: Path, name: str) -> None:
    trunk = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    more = {"vocab_size": 256} if name == "hf:llama" else {"image_size": 16, "patch_size": 8, "num_labels": 4}
    data = {"path": "synthetic", **({"block_size": 16} if name == "hf:llama" else {"image_size": 16})}
    rows = run(tmp_path / "run", asked(2, model={"name": name, **trunk, **more}, data=data))
    found = events(rows, "samples")
    assert [one["kind"] for one in found] == (["tokens"] if name == "hf:llama" else ["images"]) * 2
    assert all(len(one["samples"]) == 2 for one in found)


def test_an_event_is_bounded(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "open_decoder", lambda *_: lambda tokens: "x" * 1000 * len(tokens))
    (found, _) = events(run(tmp_path / "run", asked(MOST_SAMPLES, data=str(text))), "samples")
    assert len(found["samples"]) == TINY["batch_size"], "a batch is held out, at most"
    assert {len(part) for one in found["samples"] for part in one.values()} == {2000}
    assert len(json.dumps(found)) < 70_000

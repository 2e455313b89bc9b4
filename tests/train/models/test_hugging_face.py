"""Models of transformers, built by settings and from a hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launch_train.common.config import ExternalModel, parse
from launch_train.common.errors import UsageError
from launch_train.data import open_data
from launch_train.distributed.process_group import Ranks
from launch_train.models import blocks, build_model, flops_per_sample, hub, resolve_task
from launcher.testing.httpserver import Head, Response
from tests.train.hub import Hub, refusal, run_with_hub

pytestmark = pytest.mark.usefixtures("one_thread")

TRUNK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LLAMA = {"name": "hf:llama", "vocab_size": 64, **TRUNK}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"name": "hf:gpt2", "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 32},
    "bert": {"name": "hf:bert", "vocab_size": 64, **TRUNK},
    "vit": {"name": "hf:vit", "image_size": 16, "patch_size": 8, "num_labels": 4, **TRUNK},
}
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def made(model: dict[str, Any], source: Any = None, **config: Any) -> Any:
    torch.manual_seed(1)
    return build_model(parse({"model": model, **config}), source)


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (IMAGES, torch.tensor([0, 3])) if name == "vit" else (TOKENS, TOKENS)


def refused(model: dict[str, Any], source: Any = None) -> str:
    with pytest.raises(UsageError) as caught:
        made(model, source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_is_built_from_its_settings_and_learns(name: str) -> None:
    model = made(MODELS[name])
    inputs, targets = batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.training
    assert model.model.config._attn_implementation == "sdpa"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert [type(block).__name__ for block in blocks(model)] == 2 * [type(blocks(model)[0]).__name__]


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_parameters(name: str) -> None:
    one, other = made(MODELS[name]).state_dict(), made(MODELS[name]).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)
    torch.manual_seed(2)
    third = build_model(parse({"model": MODELS[name]})).state_dict()
    assert not all(torch.equal(one[key], third[key]) for key in one)


def test_a_causal_model_sees_nothing_of_the_future_and_targets_are_not_shifted_again() -> None:
    model = made(LLAMA).eval()
    changed = TOKENS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 64
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    expected = nn.functional.cross_entropy(before.flatten(0, 1), TOKENS.flatten())
    torch.testing.assert_close(model(TOKENS, TOKENS), expected)


def test_an_encoder_is_for_masked_language_unless_asked_otherwise() -> None:
    """Its causal head would let each token see the one that it is to tell, if it were not made a decoder."""
    assert type(made(MODELS["bert"]).model).__name__ == "BertForMaskedLM"
    decoder = made({**MODELS["bert"], "task": "causal-lm"}).eval()
    assert type(decoder.model).__name__ == "BertLMHeadModel"
    changed = TOKENS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 64
    torch.testing.assert_close(decoder(TOKENS)[:, :10], decoder(changed)[:, :10])


def test_the_data_goes_by_the_head_that_is_chosen() -> None:
    """Shown what comes next, an encoder would only have to copy it."""
    config = resolve_task(parse({"model": MODELS["bert"], "data": {"path": "synthetic", "block_size": 16}}))
    assert isinstance(config.model, ExternalModel)
    assert config.model.task == "masked-lm"
    inputs, targets = open_data(config, Ranks()).train(1, slice(0, 24))
    assert (targets == -100).any()
    assert inputs.max() == 63
    vit = resolve_task(parse({"model": MODELS["vit"], "data": "synthetic"}))
    assert open_data(vit, Ranks()).train(1, slice(0, 2))[0].shape == (2, 3, 16, 16)
    assert resolve_task(parse({"model": "my:model"})) == parse({"model": "my:model"})


def test_nothing_is_read_back_in_a_pass() -> None:
    """A tensor without data would say so: on a GPU, the host would wait for it."""
    for name in ("llama", "gpt2", "bert"):
        tokens = TOKENS.to("meta")
        assert made(MODELS[name]).to("meta")(tokens, tokens).shape == ()


def test_several_sequences_in_a_row_are_still_told_apart() -> None:
    model = made(LLAMA).eval()
    inputs = {"input_ids": TOKENS, "position_ids": torch.tensor([[*range(8), *range(8)]] * 2)}
    torch.testing.assert_close(model(inputs)[:, 8:], model(TOKENS[:, 8:]))
    assert not torch.allclose(model(TOKENS)[:, 8:], model(TOKENS[:, 8:]))


def test_targets_that_do_not_count() -> None:
    model = made(MODELS["bert"]).eval()
    targets = torch.full_like(TOKENS, -100)
    targets[0, 3] = 7
    expected = nn.functional.cross_entropy(model(TOKENS)[0, 3:4], torch.tensor([7]))
    torch.testing.assert_close(model(TOKENS, targets), expected)


def test_inputs_may_be_named() -> None:
    model = made(MODELS["bert"]).eval()
    mask = torch.ones_like(TOKENS)
    torch.testing.assert_close(model({"input_ids": TOKENS, "attention_mask": mask}), model(TOKENS))


def test_the_state_loads_back_into_transformers() -> None:
    import transformers

    model = made(LLAMA)
    theirs: Any = transformers.LlamaForCausalLM(model.model.config)
    theirs.load_state_dict({name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()})
    assert torch.equal(theirs.lm_head.weight, model.model.lm_head.weight)


def test_flops_are_counted() -> None:
    """Six for each parameter that is multiplied with, and attention's."""
    source: Any = SimpleNamespace(per_sample=16, train=lambda step, share: (TOKENS[share], TOKENS[share]), finish=tuple)
    model = made(LLAMA)
    parameters = sum(p.numel() for p in model.parameters()) - 64 * 32
    flops = flops_per_sample(parse({"model": LLAMA}), source, model)
    assert flops == pytest.approx(16 * (6 * parameters + 12 * 2 * 32 * 16), rel=0.02)
    assert flops_per_sample(parse({"model": LLAMA}), None, model) is None


def test_the_data_says_how_many_classes_and_how_large() -> None:
    model = {key: value for key, value in MODELS["vit"].items() if key not in ("num_labels", "image_size")}
    source = SimpleNamespace(num_classes=7, per_sample=1)
    vit = made(model, source, data={"path": "images", "image_size": 32})
    assert vit(torch.randn(2, 3, 32, 32)).shape == (2, 7)


CLASSES = SimpleNamespace(num_classes=5, image_size=16)
LARGE = SimpleNamespace(num_classes=4, image_size=32)


@pytest.mark.parametrize(
    ("model", "source", "said"),
    [
        ({"name": "hf:zzzzzz"}, None, "hf:ORG/NAME"),
        ({"name": "hf:distilgpt2"}, None, "pretrained: true"),
        ({**LLAMA, "dtype": "bfloat16"}, None, "model.dtype: hf:llama has no such setting"),
        ({**LLAMA, "hidden_size": "x"}, None, "Field 'hidden_size' expected int, got str"),
        ({"name": "hf:t5"}, None, "transformers' t5 has no head that the trainer knows (causal-lm, masked-lm,"),
        ({"name": "hf:bart"}, None, "has an encoder and a decoder"),
        ({**MODELS["vit"], "task": "causal-lm"}, None, "vit has no head for causal-lm; it has image-classification"),
        (MODELS["vit"], CLASSES, "model.num_labels: 4 is too small for the data, which has 5 classes"),
        (MODELS["vit"], LARGE, "takes images of 16 x 16, and the data's are 32 x 32: data: {image_size: 16}"),
    ],
)
def test_what_cannot_be_built(model: dict[str, Any], source: Any, said: str) -> None:
    assert said in refused(model, source)


# --- The hub --------------------------------------------------------------------------------------------------------


class Models(Hub):
    """A hub that has the files of `folder` as org/model. `seen` are the requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.seen: list[str] = []

    def answer(self, head: Head) -> Response:
        path = f"{head.path}?{head.query}".rstrip("?")
        self.seen.append(f"{head.method} {path} {head.headers.get('authorization', '')}".strip())
        parts = head.path.strip("/").split("/")
        if parts[0] == "broken":
            return Response(status=503)
        if parts[:2] == ["org", "silent"]:
            return Response(wait=3)
        if parts[:2] == ["org", "gated"]:
            return refusal("GatedRepo", 403)
        if parts[:2] != ["org", "model"] and parts[0] != "shortname":
            return refusal("RepoNotFound")
        file = self.folder / parts[-1]
        if not file.is_file():
            return refusal("EntryNotFound")
        data = file.read_bytes()
        return Response(data, headers={"ETag": f'"{len(data)}-{parts[-1]}"', "X-Repo-Commit": "1" * 40})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """A hub with a small Llama."""
    folder = tmp_path_factory.mktemp("hub")
    made(LLAMA).model.save_pretrained(folder)
    with Models(folder) as hub:
        yield hub


PROGRAM = """
import json, sys, time, torch
from launch_train.common.config import parse
from launch_train.common.errors import UsageError
from launch_train.models import build_model, hub
for text in sys.argv[1:]:
    hub.PATIENCE = 1.0 if "silent" in text else 10.0
    torch.manual_seed(5)
    began = time.monotonic()
    try:
        model = build_model(parse({"model": json.loads(text)}))
        weight = model.model.model.embed_tokens.weight
        print(json.dumps({"layers": len(model.model.model.layers), "sum": weight.double().sum().item(),
                          "training": model.model.training, "dtype": str(weight.dtype)}))
    except UsageError as error:
        print(json.dumps({"error": str(error), "seconds": time.monotonic() - began}))
"""


@pytest.fixture(scope="module")
def answers(served: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each model of a hub; of the last ones when it was broken."""
    url = served.url
    cache = tmp_path_factory.mktemp("cache")
    there: dict[str, dict[str, Any]] = {
        "pretrained": {"name": "hf:org/model", "pretrained": True},
        "fresh": {"name": "hf:org/model"},
        "wider": {"name": "hf:org/model", "num_hidden_layers": 3},
        "wrong": {"name": "hf:org/model", "num_hiden_layers": 3},
        "nothing": {"name": "hf:org/nothing"},
        "gated": {"name": "hf:org/gated"},
        "silent": {"name": "hf:org/silent"},
        "short": {"name": "hf:shortname", "pretrained": True},
        "type": {"name": "hf:llama", "pretrained": True},
    }
    short = {"name": "hf:distilgpt2", "pretrained": True}
    gone = {"cached": there["pretrained"], "other": {"name": "hf:org/other"}, "unreachable": short}
    lines = run_with_hub(url, cache, PROGRAM, *map(json.dumps, there.values()), HF_TOKEN="hf_secret")
    lines += run_with_hub(f"{url}/broken", cache, PROGRAM, *map(json.dumps, gone.values()))
    return dict(zip((*there, *gone), lines, strict=True))


@pytest.mark.slow(turn=0)
def test_a_model_of_the_hub_with_its_weights_and_with_fresh_ones(
    served: Models, answers: dict[str, dict[str, Any]]
) -> None:
    weights = made(LLAMA).model.model.embed_tokens.weight.double().sum().item()
    assert answers["pretrained"] == {"layers": 2, "sum": weights, "training": True, "dtype": "torch.float32"}
    assert answers["fresh"]["sum"] != weights
    assert answers["wider"]["layers"] == 3
    assert "did you mean num_hidden_layers?" in answers["wrong"]["error"]
    assert any("Bearer hf_secret" in line for line in served.seen)


@pytest.mark.slow(turn=0)
def test_what_the_hub_does_not_have(served: Models, answers: dict[str, dict[str, Any]]) -> None:
    url, silent = served.url, answers["silent"]
    assert f"model not found at {url}, or it is private: give a token in HF_TOKEN" in answers["nothing"]["error"]
    assert f"is gated: accept its terms at {url}/org/gated" in answers["gated"]["error"]
    assert f"{url} can't be reached (no answer within 1 s), and nothing is cached here" in silent["error"]
    assert silent["seconds"] < 8
    assert hub.PATIENCE <= 10


@pytest.mark.slow(turn=0)
def test_a_hub_that_is_broken_is_asked_once_a_model(served: Models, answers: dict[str, dict[str, Any]]) -> None:
    """What is cached is used, without asking for each of its files."""
    url, seen = served.url, served.seen
    assert answers["cached"] == answers["pretrained"]
    assert f"model: hf:org/other: {url}/broken can't be reached (" in answers["other"]["error"]
    assert "503" in answers["other"]["error"]
    paths = [line.split()[1] for line in seen if "/broken/" in line and "harnesses" not in line]
    asked_for = ("org/model", "org/other", "distilgpt2")
    assert paths == [f"/broken/{name}/resolve/main/config.json" for name in asked_for]


@pytest.mark.slow(turn=0)
def test_a_pretrained_model_whose_name_has_no_organisation_is_one_of_the_hub(
    served: Models, answers: dict[str, dict[str, Any]]
) -> None:
    assert answers["short"] == answers["pretrained"]
    assert f"hf:llama: model not found at {served.url}" in answers["type"]["error"]
    assert "hf:ORG/NAME" in answers["type"]["error"]
    assert f"hf:distilgpt2: {served.url}/broken can't be reached" in answers["unreachable"]["error"]

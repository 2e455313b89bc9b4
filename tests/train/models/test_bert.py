"""BERT: the published sizes, transformers' own numbers, and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launch_train.common.config import Bert, parse
from launch_train.export import hugging_face
from launch_train.models import blocks, build_model, flops_per_sample
from launch_train.models.bert import BertForMasked
from launch_train.models.layers import MaskedCrossEntropy

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Bert(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.0)


@pytest.mark.parametrize(("name", "count"), [("bert-base", 109_514_298), ("bert-large", 335_174_458)])
def test_with_the_published_vocabulary_they_have_the_published_size(name: str, count: int) -> None:
    """Those of transformers' BertForMaskedLM with the configs of google-bert/bert-base-uncased and -large-uncased."""
    with torch.device("meta"):
        model = build_model(parse({"model": {"name": name, "vocab_size": 30522}}))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_it_computes_what_transformers_computes() -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    theirs: Any = transformers.BertForMaskedLM(config).eval()
    ours = BertForMasked(SMALL._replace(block_size=512)).eval()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    recipe = hugging_face._bert({**SMALL._asdict(), "block_size": 512})
    assert recipe.sources is not None
    state = {name: source.of(ours.state_dict()[source.name]) for name, source in recipe.sources.items()}
    state |= {"cls.predictions.decoder.weight": ours.head.weight, "cls.predictions.decoder.bias": ours.head.bias}
    theirs.load_state_dict(state, strict=True)
    tokens = torch.randint(64, (3, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    targets = torch.where(torch.rand(3, 16) < 0.3, tokens, -100)
    torch.testing.assert_close(ours(tokens, targets), theirs(tokens, labels=targets).loss)


def test_a_token_sees_both_sides() -> None:
    model = BertForMasked(SMALL).eval()
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 64
    before, after = model(tokens), model(changed)
    assert not torch.allclose(before[:, 2], after[:, 2])
    assert not torch.allclose(before[:, 14], after[:, 14])


def test_only_hidden_tokens_count() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, -100, -100], [-100, 4, -100]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(MaskedCrossEntropy()(logits, targets), expected)


def test_a_batch_in_which_nothing_is_hidden_has_no_loss_and_no_nan() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = MaskedCrossEntropy()(logits, torch.full((2, 3), -100))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0
    assert not gradient.any()


def test_its_blocks_and_its_flops() -> None:
    """Six for each of BERT-large's 334 million parameters that are multiplied with, and attention over 512."""
    config = parse({"model": "bert-large"})
    with torch.device("meta"):
        model: Any = build_model(config)
    assert blocks(model) == list(model.blocks)
    flops = flops_per_sample(config, None, model)
    assert flops is not None
    parameters = 335_180_608 - 514 * 1024
    assert flops / 512 == 6 * parameters + 12 * 24 * 1024 * 512

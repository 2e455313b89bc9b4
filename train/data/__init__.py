"""What a run learns from. The samples of a step depend on seed and step alone, however many ranks share them."""

from __future__ import annotations

from train.config import Config, Gpt
from train.data.source import Batch, Source
from train.data.synthetic import SyntheticImages, SyntheticTokens
from train.data.text import Text, cache_folder, prepare
from train.dist import Ranks, gather, once_per_node
from train.errors import UsageError

__all__ = ["Batch", "Source", "open_data"]


def open_data(config: Config, ranks: Ranks) -> Source:
    """The source that `config.data` names. The first process of each node prepares it, the others wait.

    Raises UsageError on every rank: nothing at the path, too little text, or nodes that read different data.
    """
    model, seed, batch_size = config.model, config.seed, config.batch_size
    if not isinstance(model, Gpt):
        return SyntheticImages(model.num_classes, model.image_size, seed, batch_size, ranks.device)
    if config.data == "synthetic":
        return SyntheticTokens(model.vocab_size, model.block_size, seed, batch_size, ranks.device)
    corpus = once_per_node(ranks, lambda: prepare(config.data, cache_folder()))
    if len({theirs.sha256 for theirs in gather(ranks, corpus)}) > 1:
        raise UsageError(f"data: the nodes read different text at {config.data}; all need the same")
    return Text(corpus, model.block_size, seed, batch_size, ranks.device)

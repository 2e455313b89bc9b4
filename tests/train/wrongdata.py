"""What can be wrong with the data: cases of tests.train.wrongs."""

from __future__ import annotations

from tests.train.material import GPT, LLAMA, OWN, RESNET, TEXT, Wrong, data, tokens

DATA: dict[str, Wrong] = {
    "missing": Wrong(
        "missing data",
        {"data": "/no/such/data"},
        "data: /no/such/data does not exist on this machine",
    ),
    "short": Wrong(
        "text shorter than a block",
        {"data": "{here}/short.txt"},
        "data: {here}/short.txt has 5 bytes; block_size 8 needs 90",
    ),
    "empty": Wrong(
        "a folder without text",
        {"data": "{here}/empty"},
        "data: the folder {here}/empty holds no text files",
    ),
    "jsonl": Wrong(
        "a line of a .jsonl file without text",
        {"data": {"path": "{here}/lines.jsonl", "tokenizer": "{here}/tokenizer.json"}},
        'data: {here}/lines.jsonl:2: not a JSON object with "text", it has txt',
    ),
    "no-block": Wrong(
        "a text model without data.block_size",
        {"model": LLAMA, "data": "{here}/text.txt"},
        "data: block_size (tokens per sample) is required: data: {block_size: 1024}",
    ),
    "tokenizer-missing": Wrong(
        "a missing tokenizer",
        {"data": {**TEXT, "tokenizer": "{here}/none.json"}},
        "data: tokenizer {here}/none.json can't be read: No such file or directory (bytes, a tokenizer.json, or "
        "tiktoken:ENCODING)",
    ),
    "tokenizer-broken": Wrong(
        "a file that isn't a tokenizer",
        {"data": {**TEXT, "tokenizer": "{here}/no-tokenizer.json"}},
        "data: {here}/no-tokenizer.json is not a tokenizer.json: …",
    ),
    "tokenizer-larger": Wrong(
        "a vocabulary larger than the model's",
        {"data": {**TEXT, "tokenizer": "{here}/tokenizer.json"}},
        "data: tokenizer.json has 300 tokens; the model's vocab_size, 256, must be at least that",
    ),
    "tokenizer-larger-hf": Wrong(
        "the same with a transformers model",
        {"model": LLAMA, "data": {**TEXT, "tokenizer": "{here}/tokenizer.json"}},
        "model.vocab_size: 256 is too small for the data, which has 300 tokens",
    ),
    "classless": Wrong(
        "a folder without images",
        {"model": RESNET, "data": "{here}/empty"},
        "data: {here}/empty holds neither folders of images, one for each class, nor tar shards",
    ),
    "no-image": Wrong(
        "a file that isn't an image",
        {"model": RESNET, "data": "{here}/cats"},
        "data: {here}/cats/…/….jpg is not a readable image: cannot identify image file it",
    ),
    "classes": Wrong(
        "a number of classes that differs from the model's",
        {"model": {**RESNET, "num_classes": 9}, "data": "{here}/cats"},
        "data: {here}/cats has 2 classes, and the model 9: model: {num_classes: 2}",
    ),
    "cut": Wrong(
        "a shard truncated within a file",
        {"model": RESNET, "data": "{here}/cut.tar"},
        "data: {here}/cut.tar can't be read as an unpacked tar file: unexpected end of data",
    ),
    "cut-between": Wrong(
        "a shard truncated between two files",
        {"model": RESNET, "data": "{here}/cut-between.tar"},
        "data: {here}/cut-between.tar has no end-of-archive marker: it was cut short, or is still being written",
    ),
    "labels": Wrong(
        "images without labels",
        {"model": RESNET, "data": "{here}/labelless.tar"},
        "data: {here}/labelless.tar: 0.jpg has no label file (0.cls or .json)",
    ),
    "own-missing": Wrong(
        "a dataset function that doesn't exist",
        {**OWN, "data": "mine:dta"},
        "data: mine:dta: mine.py has no dta; did you mean data?",
    ),
    "own-stream": Wrong(
        "an iterable dataset",
        {**OWN, "data": "mine:stream"},
        "data: mine:stream must return a map-style dataset (with len and [index]), not an iterable one",
    ),
    "own-empty": Wrong("an empty dataset", data("empty"), "data: mine:data is empty"),
    "own-single": Wrong(
        "samples that aren't pairs",
        data("single"),
        "data: mine:data[0] is float32[4]; a sample is (input, target)",
    ),
    "own-words": Wrong(
        "samples that aren't numbers",
        {**OWN, "data": "mine:words"},
        "data: mine:words[31] holds str; a batch is made of tensors, arrays and numbers",
    ),
    "own-shapes": Wrong(
        "samples of different shapes",
        data("shapes"),
        "data: mine:data[16] is float32[4], and mine:data[31] is float32[5]: all samples must have the "
        "same shape and type",
    ),
    "own-wide": Wrong(
        "samples with the wrong shape for the model",
        data("wide"),
        "model failed at mine.py:…: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x7 and 4x3)",
    ),
    "own-raises": Wrong(
        "a sample that fails to load",
        {**data("raises"), "steps": 20},
        "data: mine:data [20] failed at mine.py:…: OSError: gone",
    ),
    "own-nan": Wrong(
        "samples with nan or infinite values",
        {**data("nan"), "steps": 40, "non_finite": 3},
        "step 4: the gradients were not finite in 4 steps in a row. The events non_finite in the run folder name "
        "the samples: …",
    ),
    "own-token": Wrong(
        "a token outside the model's vocabulary",
        {"data": tokens(256)},
        "data: mine:tokens[…] has the token 256, and gpt accepts 0 to 255",
    ),
    "own-token-hf": Wrong(
        "the same with a transformers model",
        {"model": LLAMA, "data": tokens(-1)},
        "data: mine:tokens[…] has the token -1, and hf:llama accepts 0 to 255",
    ),
    "own-long": Wrong(
        "samples longer than the model accepts",
        {"model": {**GPT, "block_size": 3}, "data": tokens(1)},
        "data: mine:tokens[…] has 4 tokens, and gpt takes 3 at most",
    ),
    "own-floats": Wrong(
        "floats instead of tokens",
        {"data": "mine:data"},
        "data: mine:data[…] is float32[4], and gpt takes int64[tokens]",
    ),
    "own-no-images": Wrong(
        "vectors instead of images",
        {"model": RESNET, "data": "mine:data"},
        "data: mine:data[…] is float32[4], and resnet50 takes float32[3, height, width]",
    ),
}

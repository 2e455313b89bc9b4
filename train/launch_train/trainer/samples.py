"""Samples of an evaluation, for a person to look at: held-out texts that the model continues, or held-out images that
it classifies.

They change nothing in training. The model is in eval mode and runs uncompiled, the random generators are restored, and
an error costs the samples alone.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launch_train.checkpointing import rng_state
from launch_train.common.config import Config, ExternalModel, ResNet, no_samples_of
from launch_train.common.decisions import Choice
from launch_train.common.text import one_line
from launch_train.data import open_decoder
from launch_train.data.batch import move_to, split
from launch_train.data.source import Batch, Source
from launch_train.models.introspection import without_compiler
from launch_train.performance.micro_batch import free_memory
from launch_train.performance.precision import PrecisionPolicy, autocast

if TYPE_CHECKING:
    from launch_train.data.tokenizers import Decode

PROMPT_TOKENS, NEW_TOKENS = 64, 128
"""Most tokens of a prompt, which is at most half of a block, and of its continuation."""

TEMPERATURE, LIKELIEST = 0.8, 200
"""Each token is drawn from so many of the likeliest, as in nanoGPT's sample.py: always the likeliest repeats itself."""

SECONDS = 5.0
"""Time limit of an evaluation's continuations; beyond it they are shorter, or fewer. On a CPU a large model would take
minutes. Other ranks wait, and if their machine is preempted meanwhile, a save must still fit into its notice period."""

MOST_CHARACTERS = 2000
"""Most characters of a prompt and of a continuation in the run folder. A token may have any length."""

MOST_NAME = 100
"""Most characters of a class's name."""

SIDE = 64
"""Largest width and height, in pixels: a picture then has at most 12 KB."""


def unless_unsupported(config: Config) -> tuple[Config, tuple[Choice, ...]]:
    """Return the config, without samples if the model has none, and this choice.

    Only the trainer knows the task of a transformers model with `task: auto`; `launch` refuses the other cases.
    """
    task = config.model.task if isinstance(config.model, ExternalModel) else "auto"
    why = no_samples_of(config.model.name, task) if config.eval.samples else ""
    if not why:
        return config, ()
    return config._replace(eval=config.eval._replace(samples=0)), (Choice("samples", "none", f"eval.samples {why}"),)


@dataclass
class Sampler:
    config: Config
    source: Source
    policy: PrecisionPolicy
    device: torch.device
    _off: bool = False
    """After an error."""
    _has_pictures: bool = False
    """The images are the same in each evaluation, so only the first event of a start has them."""

    def take(self, model: nn.Module, micro_batch: int, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the fields of the event, or None if the run is stopped meanwhile, or after an error, which is printed.

        `model`: without DDP and compiler. `micro_batch`: most samples in one pass.
        """
        if self._off:
            return None
        samples, problem = None, ""
        generators = rng_state.read_generators(self.device)
        model.eval()
        try:
            with torch.no_grad(), without_compiler():
                samples = self._take(model.model if self.config.loss else model, micro_batch, is_stopped)
        except Exception as error:  # noqa: BLE001 - whatever fails here, training continues
            problem = one_line(error, 200)
        finally:
            model.train()
            rng_state.restore_generators(generators, self.device)
        if problem:
            self._off = True
            free_memory(self.device)
            print(f"no samples from here on: {problem}", flush=True)
        return samples

    def _take(self, model: Any, micro_batch: int, is_stopped: Callable[[], bool]) -> dict[str, Any] | None:
        raw = self._held_out()
        batch = self.source.finish(move_to(raw, self.device))
        if isinstance(self.config.model, ResNet) or getattr(self.config.model, "task", "") == "image-classification":
            return self._images(model, micro_batch, raw[0], batch)
        return self._texts(model, micro_batch, batch[0], is_stopped)

    def _held_out(self) -> Batch:
        """Return the same samples each time, spread over the held-out part as a batch is if there is only one."""
        most = min(self.config.batch_size, self.source.facts.get("data_held_out_samples") or self.config.batch_size)
        count = min(self.config.eval.samples, most)
        every = most // count
        return self.source.held_out(0, 1, slice(0, count * every, every))

    @cached_property
    def _decode(self) -> Decode | None:
        return open_decoder(self.config, self.source)

    def _texts(
        self, model: Any, micro_batch: int, inputs: Any, is_stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
            raise TypeError("the data's inputs are not rows of tokens")
        decode, until = self._decode, time.monotonic() + SECONDS
        prompts = inputs[:, : min(PROMPT_TOKENS, max(1, inputs.shape[1] // 2))]
        generator = torch.Generator().manual_seed(self.config.seed)

        def is_over() -> bool:
            return is_stopped() or time.monotonic() >= until

        def logits(tokens: Tensor) -> Tensor:
            with autocast(self.policy, self.device):
                scores: Tensor = model(tokens[:, -inputs.shape[1] :])
            return scores[:, -1, : self.source.vocab_size].float().cpu()

        rows: list[list[int]] = []
        for part in split(prompts, micro_batch):
            if not is_over():
                rows += continuations(logits, part, generator, is_over).tolist()
        if is_stopped():
            return None
        end, length = getattr(self.source, "end", None), prompts.shape[1]
        pairs = [(row[:length], list(takewhile(lambda token: token != end, row[length:]))) for row in rows]
        texts = [_decoded(decode, *pair) if decode else [" ".join(map(str, part)) for part in pair] for pair in pairs]
        samples = [{"prompt": prompt[:MOST_CHARACTERS], "text": text[:MOST_CHARACTERS]} for prompt, text in texts]
        return {"kind": "text" if decode else "tokens", "samples": samples}

    def _images(self, model: Any, micro_batch: int, shown: Any, batch: Batch) -> dict[str, Any]:
        """Return what the model takes the images for. `shown`: the images before they were normalised."""
        inputs, labels = batch
        if not isinstance(shown, Tensor) or shown.dim() != 4 or labels.dim() != 1 or labels.is_floating_point():
            raise TypeError("the data's samples are not images with the numbers of their classes")
        with autocast(self.policy, self.device):
            logits = torch.cat([model(part) for part in split(inputs, micro_batch)])
        likely = logits.float().softmax(dim=1).cpu().max(dim=1)
        if not likely.values.isfinite().all():
            raise ValueError("the model's outputs are not finite")
        rows = zip(labels.tolist(), likely.indices.tolist(), likely.values.tolist(), strict=True)
        samples = [
            {"true": self._name(true), "predicted": self._name(guess), "probability": round(share, 4)}
            for true, guess, share in rows
        ]
        pictures = {} if self._has_pictures else {"thumbnails": thumbnails(shown)}
        self._has_pictures = True
        return {"kind": "images", "samples": samples, **pictures}

    def _name(self, number: int) -> str:
        names = self.source.class_names
        return names[number][:MOST_NAME] if 0 <= number < len(names) else str(number)


def continuations(
    logits: Callable[[Tensor], Tensor], prompts: Tensor, generator: torch.Generator, is_over: Callable[[], bool]
) -> Tensor:
    """Return `prompts` [count, length] with NEW_TOKENS more each, or fewer once `is_over`.

    `logits` returns those of the next token, float32 [count, vocabulary] on the CPU, where `generator` is. Raises
    ValueError if they are not finite.
    """
    tokens = prompts
    while tokens.shape[1] < prompts.shape[1] + NEW_TOKENS and not is_over():
        scores = logits(tokens)
        best, numbers = scores.topk(min(LIKELIEST, scores.shape[1]))
        likely = (best / TEMPERATURE).softmax(dim=1)
        if not likely.isfinite().all():
            raise ValueError("the model's outputs are not finite")
        drawn = numbers.gather(1, likely.multinomial(1, generator=generator))
        tokens = torch.cat([tokens, drawn.to(tokens)], dim=1)
    return tokens


def _decoded(decode: Callable[[list[int]], str], prompt: list[int], new: list[int]) -> tuple[str, str]:
    """Return the text of a prompt and of its continuation. Decoded together, because a character may have tokens in
    both, and some tokenizers drop the space before the first word."""
    before, whole = decode(prompt).rstrip("\ufffd"), decode([*prompt, *new])
    return before, whole.removeprefix(before) if whole.startswith(before) else decode(new)


def thumbnails(images: Tensor) -> list[str]:
    """Return each image as a PNG in base64.

    `images`: uint8 [count, height, width, 3], or [count, channels, height, width]. Floats may be normalised in any way,
    so each image is stretched to its own range. The first three channels are shown, or only the first.
    """
    images = images.cpu()
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
        levels = images.float()
    else:
        levels = images.float().nan_to_num(0.0, 0.0, 0.0)
        low, high = levels.amin((1, 2, 3), keepdim=True), levels.amax((1, 2, 3), keepdim=True)
        levels = (levels - low) * (255 / (high - low).clamp(min=1e-6))
    colours = levels[:, :3] if levels.shape[1] >= 3 else levels[:, :1].expand(-1, 3, -1, -1)
    height, width = colours.shape[2:]
    scale = min(1.0, SIDE / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = functional.interpolate(colours, size, mode="area").round().clamp(0, 255).to(torch.uint8)
    from PIL import Image

    encoded = []
    for image in pixels.permute(0, 2, 3, 1):
        file = BytesIO()
        Image.fromarray(image.numpy()).save(file, "png")
        encoded.append(b64encode(file.getvalue()).decode())
    return encoded

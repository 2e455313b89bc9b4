"""What is measured on a GPU: loops on it alone, one after the other, in rounds. Each part has a result of its own.

Nothing else may run on the GPU meanwhile. Compiled code is kept by torch between the starts; a first round of a fresh
machine takes some minutes longer than the next.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from benchmarks import jobs
from benchmarks.tables import Loop, Measured, Step, cost_table, steps_table
from benchmarks.turns import Amount, measure


@dataclass(frozen=True)
class Sizes:
    """What is trained: the GPT and its batch; ResNet-50's images, first layer and batch; and how many JPEGs of so many
    pixels each of its classes has."""

    name: str
    gpt: Mapping[str, int]
    gpt_batch: int
    image_size: int
    width: int
    image_batch: int
    classes: int
    each: int
    pixels: tuple[int, int]
    compiles: bool = True


REAL: Final = Sizes(
    name="GPT-2 124M",
    gpt={"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304},
    gpt_batch=32,
    image_size=224,
    width=64,
    image_batch=256,
    classes=1000,
    each=2,
    pixels=(500, 375),
)
"""GPT-2 124M, and ResNet-50 on images as large as ImageNet's usually are."""

SHRUNK: Final = Sizes(
    name="a tiny GPT",
    gpt={"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 320},
    gpt_batch=4,
    image_size=32,
    width=8,
    image_batch=8,
    classes=10,
    each=2,
    pixels=(100, 75),
    compiles=False,
)
"""To try the benchmark itself, also without a GPU."""

NAME = """
import json, torch
found = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if found else "no GPU"
print(json.dumps({"name": name, "cuda": torch.version.cuda or ""}))
"""


@dataclass(frozen=True)
class Device:
    """The first GPU as CUDA calls it, and torch's CUDA. Asked in another process: this one leaves the GPU alone."""

    name: str
    cuda: str

    @property
    def there(self) -> bool:
        return self.name != "no GPU"


def device() -> Device:
    return Device(**json.loads(subprocess.run([sys.executable, "-c", NAME], capture_output=True, check=True).stdout))


def on_gpu(part: str, amount: Amount, sizes: Sizes, found: Device) -> list[str]:
    """The table of one of PARTS."""
    with jobs.text() as path:
        return PARTS[part]({**jobs.JOB, "text": str(path)}, replace(amount, warm_up=20, together=False), sizes, found)


def _gpt(told: jobs.Told, amount: Amount, sizes: Sizes, found: Device) -> list[str]:
    """GPT-2 124M in bf16, compiled: tokens/s and MFU beside the same loop by hand."""
    job = {**told, "shape": sizes.gpt, "batch_size": sizes.gpt_batch, "compile": sizes.compiles, "precision": "bf16"}
    base = jobs.config(job, precision="bf16", compile=sizes.compiles)
    graphs = [jobs.trainer("trainer, CUDA graphs", {**base, "cuda_graphs": True})] if found.there else []
    loops = [*jobs.plain(job), jobs.trainer("trainer", base), *graphs]
    tokens = sizes.gpt_batch * sizes.gpt["block_size"]
    step = Step(tokens, flops=tokens * _flops_per_token(sizes.gpt), peak=_peak(found))
    title = f"{sizes.name}, T = {sizes.gpt['block_size']}, batch {sizes.gpt_batch}, bf16"
    measured = measure(loops, amount)
    return told_of(loops, measured, steps_table(measured, title, step))


def told_of(loops: Sequence[Loop], measured: Sequence[Measured], table: list[str]) -> list[str]:
    """With the table which loops failed, and what each trainer chose: that it could not compile, it says there."""
    there = {one.loop.title for one in measured}
    failed = [f"{loop.title} ended before its last step: not measured.\n" for loop in loops if loop.title not in there]
    trainers = [(one.loop.title, _beginning(one.said)) for one in measured if one.loop.program == "trainer"]
    return [*table, *failed, *(f"{title}:\n\n```\n{said}\n```\n" for title, said in trainers if said)]


def _beginning(said: str) -> str:
    """What the trainer says before its first step, without this machine's names of files."""
    before = re.split(r"^step ", said, flags=re.MULTILINE)[0].strip()
    return re.sub(re.escape(tempfile.gettempdir()) + r"/[^\s,]+", "data made for this", before)


def _flops_per_token(shape: Mapping[str, Any]) -> float:
    import torch

    from train.config.settings import Gpt
    from train.models import gpt

    with torch.device("meta"):
        return gpt.flops_per_token(Gpt(**shape), gpt.GPT(Gpt(**shape)))


def _peak(found: Device) -> float | None:
    """Dense bf16 FLOP/s; None where they are unknown."""
    from train.bench import peaks

    teraflops = peaks.tflops(found.name).get("bf16")
    return teraflops * 1e12 if teraflops else None


def _resnet(_told: jobs.Told, amount: Amount, sizes: Sizes, _found: Device) -> list[str]:
    """ResNet-50: bf16 beside fp32 (without TF32), and decoded JPEGs beside images that are made on the GPU."""
    model = {"name": "resnet50", "num_classes": sizes.classes, "image_size": sizes.image_size, "width": sizes.width}
    base = {"model": model, "data": "synthetic", "steps": jobs.STEPS, "batch_size": sizes.image_batch}
    base |= {"eval": {"every": 0}, "compile": sizes.compiles}
    with pictures(sizes) as folder:
        loops = [
            jobs.trainer("fp32", {**base, "precision": "fp32"}),
            jobs.trainer("bf16", {**base, "precision": "bf16"}),
            jobs.trainer("bf16, JPEGs", {**base, "precision": "bf16", "data": str(folder)}),
        ]
        measured = measure(loops, amount)
    title = f"trainer, ResNet-50, batch {sizes.image_batch}"
    return told_of(loops, measured, steps_table(measured, title, Step(sizes.image_batch, "images")))


@contextmanager
def pictures(sizes: Sizes, different: int = 100) -> Iterator[Path]:
    """A folder with a folder of JPEGs for each class. Only some of them differ: decoding doesn't know."""
    import numpy as np

    made = [_jpeg(np.random.default_rng(number), sizes.pixels) for number in range(different)]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(sizes.classes * sizes.each):
            path = Path(folder) / f"{number // sizes.each:04d}" / f"{number % sizes.each}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(made[number % different])
        yield Path(folder)


def _jpeg(numbers: Any, pixels: tuple[int, int]) -> bytes:
    """Patches of colour with some grain, at quality 90: at 500 × 375 pixels about 100 kB, as an image of ImageNet."""
    import numpy as np
    from PIL import Image

    patches = Image.fromarray(numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(patches.resize(pixels, Image.Resampling.BICUBIC), dtype=np.float32)
    grained = np.clip(smooth + numbers.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(grained).save(file, "JPEG", quality=90)
    return file.getvalue()


def _small(told: jobs.Told, amount: Amount, sizes: Sizes, found: Device) -> list[str]:
    """A GPT so small that the GPU waits for the host to start its kernels: compiled, with CUDA graphs, and neither."""
    job = {**told, "precision": "bf16", "compile": sizes.compiles}
    base = jobs.config(job, precision="bf16")
    loops = [*jobs.plain({**job, "compile": False}), jobs.trainer("trainer, not compiled", {**base, "compile": False})]
    if found.there:
        loops += jobs.plain(job, title="plain loop, compiled")[:1]
        loops += [jobs.trainer("trainer", base), jobs.trainer("trainer, CUDA graphs", {**base, "cuda_graphs": True})]
    step = Step(job["batch_size"] * job["shape"]["block_size"])
    measured = measure(loops, _more(amount))
    return told_of(loops, measured, steps_table(measured, "a small GPT, bf16", step))


def _overhead(told: jobs.Told, amount: Amount, _sizes: Sizes, _found: Device) -> list[str]:
    """What a step of the trainer costs the host beside the kernels."""
    job = {**told, "shape": jobs.HARDLY, "batch_size": 2}
    base = jobs.config(job, precision="fp32", compile=False)
    quiet = jobs.trainer("trainer, writes nothing", {**base, "monitor": 0}, writes=False)
    loops = [*jobs.plain(job), jobs.trainer("trainer", base), quiet]
    measured = measure(loops, _more(amount))
    return told_of(loops, measured, cost_table(measured, "a model of hardly any work"))


def _more(amount: Amount) -> Amount:
    """Such steps take a millisecond or two."""
    return replace(amount, steps=10 * amount.steps)


PARTS: Final = {"gpt": _gpt, "resnet": _resnet, "small": _small, "overhead": _overhead}

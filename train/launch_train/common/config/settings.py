"""The settings of `run.config` as named tuples with their defaults. Standard library only, and quick to import: a named
tuple takes an eighth of the time of a frozen dataclass to define."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from launch_train.common.contract import DEFAULT_LOGGERS

Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
Checkpointing = Literal["none", "selective", "full"]
Parallel = Literal["ddp", "fsdp"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


# --- Models ---------------------------------------------------------------------------------------------------------


class Gpt(NamedTuple):
    """A GPT in nanoGPT's shape; it predicts the next token."""

    name: str = "gpt"
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    vocab_size: int = 256
    bias: bool = False
    dropout: float = 0.0


class Bert(NamedTuple):
    """BERT's encoder with its masked-language head; it predicts hidden tokens, a `masked` share of all."""

    name: str = "bert"
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    vocab_size: int = 320
    dropout: float = 0.1
    masked: float = 0.15


class ResNet(NamedTuple):
    """ResNet-50 (v1.5) in torchvision's shape. `width`: channels of the first layer; the original has 64."""

    name: str = "resnet50"
    num_classes: int = 1000
    image_size: int = 224
    width: int = 64


class ExternalModel(NamedTuple):
    """An external model and its settings: one of transformers, by the type of its config (`hf:llama`) or its name on
    the hub, or a user function (`my_pkg.model:build`)."""

    name: str
    settings: Mapping[str, Any] = _NONE
    pretrained: bool = False
    """For transformers: use pretrained weights from the hub, instead of fresh ones."""
    task: Literal["auto", "causal-lm", "masked-lm", "image-classification"] = "auto"
    """For transformers: the head; auto: masked-lm for encoders, else the first of these that its type has."""


Shape = Gpt | Bert | ResNet | ExternalModel

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "gpt": {},
    "gpt2-124m": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "block_size": 1024, "vocab_size": 50304},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280, "block_size": 1024, "vocab_size": 50304},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024, "vocab_size": 50304},
    "bert": {},
    "bert-base": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 512, "vocab_size": 30528},
    "bert-large": {"n_layer": 24, "n_head": 16, "n_embd": 1024, "block_size": 512, "vocab_size": 30528},
    "resnet50": {},
}
"""Built-in models by name. Vocabularies are padded to a multiple of 64 (GPT-2's 50257 to 50304, as nanoGPT does; BERT's
30522 to 30528, as NVIDIA does), because the matrix product over them is then faster."""


def kind_of(name: str) -> type[Gpt | Bert | ResNet]:
    """Return the class of one of PRESETS."""
    return ResNet if name == "resnet50" else Bert if name.startswith("bert") else Gpt


# --- The rest -------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Training data. `path` (in a spec also `train`) is a file, a folder, a pattern, gs://…, `python-stdlib`,
    `synthetic`, or a user function (`my_pkg.data:build`), which gets the `settings`."""

    path: str = "python-stdlib"
    val: str | None = None
    """Separate validation data, like `path`; None: part of `path` is held out."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer file of Hugging Face's tokenizers (tokenizer.json), or a tiktoken encoding (tiktoken:gpt2)."""
    column: str | None = None
    """The key of .jsonl records, or the column of Parquet and Arrow files, that holds the text; None: text."""
    dtype: str | None = None
    """Type of the tokens in .bin files without a header; None: uint16."""
    block_size: int | None = None
    """Tokens per sample, if the model doesn't define it."""
    image_size: int | None = None
    """Height and width to crop images to, if the model doesn't define it."""
    settings: Mapping[str, Any] = _NONE


class Ddp(NamedTuple):
    """Settings of DDP, if `parallel` is ddp."""

    bucket_mib: int | None = None
    """MiB of gradients sent together; None: chosen by the model's size."""
    static_graph: bool | None = None
    """DDP assumes that the same operations run every step; None: where they do."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the communication buckets, instead of being copied there."""


class Loader(NamedTuple):
    """Data loading: worker processes of each rank (None: chosen by the machine and the data), and batches that each one
    prepares ahead."""

    workers: int | None = None
    prefetch: int = 2


class Optimizer(NamedTuple):
    """AdamW or SGD, with a warm-up and a cosine decay to `min_lr`."""

    name: str = "adamw"
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    fused: bool | None = None
    """Use fused kernels; None: where torch has them."""


class Eval(NamedTuple):
    """Evaluate every so many steps (0: never), on so many global batches of held-out data. `samples`: texts that the
    model continues, or images that it classifies, for a person to look at (0: none)."""

    every: int = 100
    batches: int = 20
    samples: int = 0


class Checkpoint(NamedTuple):
    """Checkpoint settings.

    `minutes` between checkpoints (auto: Young's rule; off: only when preempted and at the end), how many of the last to
    keep, every how many steps to keep one permanently (0: none), and how many of those with the lowest `keep_metric`.
    """

    minutes: float | Literal["auto", "off"] = "auto"
    keep_last: int = 3
    keep_every: int = 0
    keep_best: int = 0
    keep_metric: str = "eval_loss"


class InitFrom(NamedTuple):
    """Weights to start with: a run's ID (in the same output), gs://…, a local path, or hf:ORG/NAME.

    With `strict` every tensor must be there, and fit; otherwise what fits is loaded. `step`: of a run's checkpoints
    (None: the newest).
    """

    path: str
    strict: bool = True
    step: int | None = None


class Profile(NamedTuple):
    """Numbers of steps: before the profiler, of its warm-up, and recorded."""

    wait: int = 5
    warmup: int = 2
    active: int = 3


class Config(NamedTuple):
    """All of `run.config`, validated and complete. None means auto."""

    model: Shape = Gpt()
    data: Data = Data()
    loss: str | None = None
    """A user function, `my_pkg.losses:loss`: (model outputs, targets) -> mean loss; None: the model's own loss."""
    steps: int = 300
    batch_size: int = 24
    micro_batch_size: int | None = None
    optimizer: Optimizer = Optimizer()
    precision: Precision = "auto"
    attention: Attention = "auto"
    compile: bool | Literal["whole"] | None = None
    """True: compile each block separately where that is enough."""
    deterministic: bool | None = None
    cuda_graphs: bool = False
    channels_last: bool | None = None
    activation_checkpointing: Checkpointing = "none"
    parallel: Parallel = "ddp"
    ddp: Ddp = Ddp()
    loader: Loader = Loader()
    seed: int = 1337
    eval: Eval = Eval()
    log_every: int = 10
    loggers: tuple[str, ...] = DEFAULT_LOGGERS
    """Where rows go besides the run folder: names of contract.LOGGER_NAMES."""
    checkpoint: Checkpoint = Checkpoint()
    non_finite: int = 10
    """Consecutive steps that may be skipped because their gradients are not finite."""
    monitor: float = 5.0
    """Seconds between two samples of the GPUs and the host; 0: none."""
    hang_after: float | Literal["auto", "off"] = "auto"
    """Seconds without a step after which the run counts as hung and is restarted."""
    profile: Profile | None = None
    init_from: InitFrom | None = None


DEFAULT: Final = Config()
"""The settings of an empty config."""

SECTIONS: Final = (Gpt, Bert, ResNet, ExternalModel, Data, Ddp, Loader, Optimizer, Eval, Checkpoint, Profile, InitFrom)

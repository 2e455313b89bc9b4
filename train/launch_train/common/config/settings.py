"""The table of `run.config`: each setting with its type, the rule of its values and its default, as named tuples.

A setting that a resume may change is marked MAY_CHANGE: no step before would have been computed differently. If its
rule allows `auto` and its default is None, the trainer gets None for `auto`.

Standard library only, and quick to import: a named tuple takes an eighth of the time of a frozen dataclass to define.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from launch_train.common.config.rules import (
    FLAG,
    HUGGING_FACE,
    Rule,
    check,
    either,
    is_code,
    is_path,
    number,
    one_of,
    whole,
)
from launch_train.common.contract import DEFAULT_LOGGERS, LOGGER_NAMES

Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
Checkpointing = Literal["none", "selective", "full"]
Parallel = Literal["ddp", "fsdp"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
Task = Literal["auto", "causal-lm", "masked-lm", "image-classification"]
MAY_CHANGE: Final = "a resume may change it"
MOST_SAMPLES: Final = 16
"""Most `eval.samples`: each evaluation stores them in the run folder."""

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


# --- Rules that take more than a few words ---------------------------------------------------------------------------

_AUTO = one_of("auto")
_AUTO_OR_FLAG = one_of("auto", True, False)
_MODEL_NAME = Rule(lambda v: True, "a built-in model")  # checked before the model's other settings
_PATH = Rule(
    is_path, "python-stdlib, synthetic, a file or a folder, gs://BUCKET/…, hf:ORG/NAME, or a custom my_pkg.data:build"
)
_HELD_OUT_PATH = Rule(
    lambda v: is_path(v) and v != "synthetic" and not is_code(v), "a file or a folder, or gs://BUCKET/…"
)
_TOKENIZER = Rule(
    lambda v: is_path(v) and not v.startswith("hf:"),
    "bytes, a tokenizer.json (also gs://BUCKET/…), or tiktoken:ENCODING",
)
_COLUMN = Rule(lambda v: isinstance(v, str) and bool(v), "the name of a column, such as content")
_ARGUMENTS = Rule(lambda v: isinstance(v, Mapping), "a mapping of the arguments of your function")
_WEIGHTS = Rule(
    lambda v: is_path(v) and (not v.startswith("hf:") or bool(re.match(HUGGING_FACE, v))),
    "a run's ID (NAME-1a2b3c4d), gs://BUCKET/…, hf:ORG/NAME, or a local folder or file (launch local only)",
)
_BETAS = Rule(
    lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and all(number(0, 0.9999).holds(beta) for beta in v),
    "two numbers from 0 to 0.9999, such as [0.9, 0.95]",
)
_MINUTES = either(one_of("auto", "off"), number(0, 1e6, above=True))
_SECONDS = either(one_of("auto", "off"), number(1, 604_800))
_LOGGERS = Rule(lambda v: isinstance(v, (list, tuple)), f"a list of {', '.join(LOGGER_NAMES)}")
_PROFILE = Rule(
    lambda v: v in ("off", False) or (isinstance(v, Mapping) and not check(v, fields_of(Profile), ())),
    "off, or {wait: 5, warmup: 2, active: 3}",
)


# --- Models ---------------------------------------------------------------------------------------------------------


class Gpt(NamedTuple):
    """A GPT in nanoGPT's shape; it predicts the next token."""

    name: Annotated[str, _MODEL_NAME] = "gpt"
    n_layer: Annotated[int, whole(1, 1000)] = 4
    n_head: Annotated[int, whole(1, 1000)] = 4
    n_embd: Annotated[int, whole(1, 100_000)] = 128
    block_size: Annotated[int, whole(2, 1_000_000)] = 64
    vocab_size: Annotated[int, whole(2, 10_000_000)] = 256
    bias: Annotated[bool, FLAG] = False
    dropout: Annotated[float, number(0, 0.99)] = 0.0


class Bert(NamedTuple):
    """BERT's encoder with its masked-language head; it predicts hidden tokens, a `masked` share of all."""

    name: Annotated[str, _MODEL_NAME] = "bert"
    n_layer: Annotated[int, whole(1, 1000)] = 4
    n_head: Annotated[int, whole(1, 1000)] = 4
    n_embd: Annotated[int, whole(1, 100_000)] = 128
    block_size: Annotated[int, whole(2, 1_000_000)] = 64
    vocab_size: Annotated[int, whole(2, 10_000_000)] = 320
    dropout: Annotated[float, number(0, 0.99)] = 0.1
    masked: Annotated[float, number(0.01, 0.9)] = 0.15


class ResNet(NamedTuple):
    """ResNet-50 (v1.5) in torchvision's shape. `width`: channels of the first layer; the original has 64."""

    name: Annotated[str, _MODEL_NAME] = "resnet50"
    num_classes: Annotated[int, whole(2, 1_000_000)] = 1000
    image_size: Annotated[int, whole(32, 4096)] = 224
    width: Annotated[int, whole(1, 4096)] = 64


class ExternalModel(NamedTuple):
    """An external model and its settings: one of transformers, by the type of its config (`hf:llama`) or its name on
    the hub, or a user function (`my_pkg.model:build`)."""

    name: str
    settings: Mapping[str, Any] = _NONE
    pretrained: Annotated[bool, FLAG] = False
    """For transformers: use pretrained weights from the hub, instead of fresh ones."""
    task: Annotated[Task, one_of(*get_args(Task))] = "auto"
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

    path: Annotated[str, _PATH] = "python-stdlib"
    val: Annotated[str | None, _HELD_OUT_PATH] = None
    """Separate validation data, like `path`; None: part of `path` is held out."""
    tokenizer: Annotated[str, _TOKENIZER] = "bytes"
    """bytes, a tokenizer file of Hugging Face's tokenizers (tokenizer.json), or a tiktoken encoding (tiktoken:gpt2)."""
    column: Annotated[str | None, _COLUMN] = None
    """The key of .jsonl records, or the column of Parquet and Arrow files, that holds the text; None: text."""
    dtype: Annotated[str | None, one_of("uint8", "uint16", "uint32", "int32", "int64")] = None
    """Type of the tokens in .bin files without a header; None: uint16."""
    block_size: Annotated[int | None, whole(2, 1_000_000)] = None
    """Tokens per sample, if the model doesn't define it."""
    image_size: Annotated[int | None, whole(8, 4096)] = None
    """Height and width to crop images to, if the model doesn't define it."""
    settings: Annotated[Mapping[str, Any], _ARGUMENTS] = _NONE


class Ddp(NamedTuple):
    """Settings of DDP, if `parallel` is ddp."""

    bucket_mib: Annotated[int | None, either(_AUTO, whole(1, 10_000))] = None
    """MiB of gradients sent together; None: chosen by the model's size."""
    static_graph: Annotated[bool | None, _AUTO_OR_FLAG] = None
    """DDP assumes that the same operations run every step; None: where they do."""
    gradient_as_bucket_view: Annotated[bool, FLAG] = True
    """Gradients are views of the communication buckets, instead of being copied there."""


class Loader(NamedTuple):
    """Data loading: worker processes of each rank (None: chosen by the machine and the data), and batches that each one
    prepares ahead."""

    workers: Annotated[int | None, either(_AUTO, whole(0, 256))] = None
    prefetch: Annotated[int, whole(1, 64)] = 2


class Optimizer(NamedTuple):
    """AdamW or SGD, with a warm-up and a cosine decay to `min_lr`."""

    name: Annotated[str, one_of("adamw", "sgd")] = "adamw"
    lr: Annotated[float, number(0, 1000, above=True)] = 1e-3
    min_lr: Annotated[float, number(0, 1000)] = 1e-4
    warmup_steps: Annotated[int, whole(0, 1_000_000_000)] = 20
    weight_decay: Annotated[float, number(0, 1000)] = 0.1
    grad_clip: Annotated[float, number(0, 1e9)] = 1.0
    betas: Annotated[tuple[float, float], _BETAS] = (0.9, 0.95)
    momentum: Annotated[float, number(0, 0.9999)] = 0.9
    fused: Annotated[bool | None, _AUTO_OR_FLAG] = None
    """Use fused kernels; None: where torch has them."""


class Eval(NamedTuple):
    """Evaluate every so many steps (0: never), on so many global batches of held-out data. `samples`: texts that the
    model continues, or images that it classifies, for a person to look at (0: none)."""

    every: Annotated[int, whole(0, 1_000_000_000)] = 100
    batches: Annotated[int, whole(1, 1_000_000)] = 20
    samples: Annotated[int, whole(0, MOST_SAMPLES)] = 0


class Checkpoint(NamedTuple):
    """Checkpoint settings.

    `minutes` between checkpoints (auto: Young's rule; off: only when preempted and at the end), how many of the last to
    keep, every how many steps to keep one permanently (0: none), and how many of those with the lowest `keep_metric`.
    """

    minutes: Annotated[float | Literal["auto", "off"], _MINUTES] = "auto"
    keep_last: Annotated[int, whole(1, 1_000_000)] = 3
    keep_every: Annotated[int, whole(0, 1_000_000_000)] = 0
    keep_best: Annotated[int, whole(0, 1_000_000)] = 0
    keep_metric: Annotated[str, one_of("eval_loss")] = "eval_loss"


class InitFrom(NamedTuple):
    """Weights to start with: a run's ID (in the same output), gs://…, a local path, or hf:ORG/NAME.

    With `strict` every tensor must be there, and fit; otherwise what fits is loaded. `step`: of a run's checkpoints
    (None: the newest).
    """

    path: Annotated[str, _WEIGHTS]
    strict: Annotated[bool, FLAG] = True
    step: Annotated[int | None, whole(1, 1_000_000_000)] = None


class Profile(NamedTuple):
    """Numbers of steps: before the profiler, of its warm-up, and recorded."""

    wait: Annotated[int, whole(0, 1_000_000)] = 5
    warmup: Annotated[int, whole(0, 1000)] = 2
    active: Annotated[int, whole(1, 1000)] = 3


class Config(NamedTuple):
    """All of `run.config`, validated and complete. None means auto."""

    model: Annotated[Shape, Rule(lambda v: isinstance(v, Mapping), "a name or a mapping with a name")] = Gpt()
    data: Data = Data()
    loss: Annotated[str | None, Rule(is_code, "a custom function, my_pkg.losses:loss")] = None
    """A user function, `my_pkg.losses:loss`: (model outputs, targets) -> mean loss; None: the model's own loss."""
    steps: Annotated[int, whole(1, 1_000_000_000)] = 300
    batch_size: Annotated[int, whole(1, 10_000_000)] = 24
    micro_batch_size: Annotated[int | None, either(_AUTO, whole(1, 10_000_000))] = None
    optimizer: Optimizer = Optimizer()
    precision: Annotated[Precision, one_of(*get_args(Precision))] = "auto"
    attention: Annotated[Attention, one_of(*get_args(Attention))] = "auto"
    compile: Annotated[bool | Literal["whole"] | None, one_of("auto", True, False, "whole")] = None
    """True: compile each block separately where that is enough."""
    deterministic: Annotated[bool | None, _AUTO_OR_FLAG] = None
    cuda_graphs: Annotated[bool, FLAG] = False
    channels_last: Annotated[bool | None, _AUTO_OR_FLAG] = None
    activation_checkpointing: Annotated[Checkpointing, one_of(*get_args(Checkpointing))] = "none"
    parallel: Annotated[Parallel, one_of(*get_args(Parallel))] = "ddp"
    ddp: Ddp = Ddp()
    loader: Annotated[Loader, MAY_CHANGE] = Loader()
    seed: Annotated[int, whole(0, 2**63 - 1)] = 1337
    eval: Annotated[Eval, MAY_CHANGE] = Eval()
    log_every: Annotated[int, whole(1, 1_000_000), MAY_CHANGE] = 10
    loggers: Annotated[tuple[str, ...], _LOGGERS, MAY_CHANGE] = DEFAULT_LOGGERS
    """Where rows go besides the run folder: names of contract.LOGGER_NAMES."""
    checkpoint: Annotated[Checkpoint, MAY_CHANGE] = Checkpoint()
    init_from: InitFrom | None = None
    non_finite: Annotated[int, whole(0, 1_000_000), MAY_CHANGE] = 10
    """Consecutive steps that may be skipped because their gradients are not finite."""
    monitor: Annotated[float, number(0, 3600), MAY_CHANGE] = 5.0
    """Seconds between two samples of the GPUs and the host; 0: none."""
    hang_after: Annotated[float | Literal["auto", "off"], _SECONDS, MAY_CHANGE] = "auto"
    """Seconds without a step after which the run counts as hung and is restarted."""
    profile: Annotated[Profile | None, _PROFILE, MAY_CHANGE] = None


DEFAULT: Final = Config()
"""The settings of an empty config."""

# --- The table's readers ----------------------------------------------------------------------------------------------

SECTIONS: Final = (Gpt, Bert, ResNet, ExternalModel, Data, Ddp, Loader, Optimizer, Eval, Checkpoint, Profile, InitFrom)


def fields_of(section: type) -> dict[str, Any]:
    """Return the keys of a section as they are in a spec: each with its Rule, or with the keys of the section in it."""
    fields: dict[str, Any] = {}
    for name, hint in section.__annotations__.items():
        rules = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Rule)]
        sections = [part for part in (hint, *get_args(hint)) if part in SECTIONS]
        if rules and name.startswith("keep_"):
            fields.setdefault("keep", {})[name.removeprefix("keep_")] = rules[0]
        elif rules or sections:
            fields[name] = rules[0] if rules else fields_of(sections[0])
        if section is Data and name == "path":
            fields["train"] = rules[0]  # means the same
    return fields


FIELDS: Final = fields_of(Config)
"""All settings of run.config."""

CHANGEABLE: Final = tuple(
    name for name, hint in Config.__annotations__.items() if MAY_CHANGE in getattr(hint, "__metadata__", ())
)
"""Settings that a resume may change."""


def without_auto(section: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section in a spec, with None for `auto` where None is the default."""
    defaults: Mapping[str, Any] = section._field_defaults  # type: ignore[attr-defined]  # of a named tuple
    return {name: None if value == "auto" and defaults[name] is None else value for name, value in config.items()}

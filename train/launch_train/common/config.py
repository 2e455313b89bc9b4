"""The built-in trainer's settings, `run.config` of a spec: their table, validation, defaults, parsing.

The launcher calls `problems` before a spec costs anything, the trainer calls `parse`. Every key has a default: an empty
config trains. A setting that a resume may change is marked MAY_CHANGE: no step before would have been computed
differently. If its rule allows `auto` and its default is None, the trainer gets None for `auto`.

Standard library only, and quick to import: a named tuple takes an eighth of the time of a frozen dataclass to define.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from launch_train.common.contract import DEFAULT_LOGGERS, LOGGER_NAMES
from launch_train.common.errors import ConfigError
from launch_train.common.text import did_you_mean

# --- Rules ------------------------------------------------------------------------------------------------------------

KeyPath = tuple[str | int, ...]
Problem = tuple[KeyPath, str, str]
"""Path of keys, what is wrong, and how to fix it."""


class Rule(NamedTuple):
    """A rule for a value: a test, and its description."""

    holds: Callable[[Any], bool]
    description: str
    words: tuple[str, ...] = ()
    """The words among the values."""


def whole(low: int, high: int) -> Rule:
    return Rule(lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float, *, above: bool = False) -> Rule:
    def holds(value: Any) -> bool:
        # A nan fails every comparison.
        return type(value) in (int, float) and (low < value if above else low <= value) and bool(value <= high)

    return Rule(holds, f"a number {'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}")


def one_of(*values: Any) -> Rule:
    def holds(value: Any) -> bool:
        return any(value == known and type(value) is type(known) for known in values)

    description = "one of " + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    return Rule(holds, description, tuple(v for v in values if isinstance(v, str)))


def any_of(first: Rule, second: Rule) -> Rule:
    description = f"{first.description}, or {second.description}"
    return Rule(lambda v: first.holds(v) or second.holds(v), description, first.words + second.words)


FLAG: Final = one_of(True, False)

# --- Names and paths --------------------------------------------------------------------------------------------------

HUGGING_FACE: Final = r"^hf:[\w.-]+(/[\w.-]+)?$"
RUN_ID: Final = r"^[a-z][a-z0-9-]*-[0-9a-f]{8}(-\d+)?$"
"""A run's ID, as launch makes it. It must be told from a local path, so one that --run-id set needs its folder."""

_CODE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_DATASET = r"^hf:[\w.-]+/[\w.-]+(@[\w.-]+)?(/.+)?$"
_SCHEME = r"^[A-Za-z][A-Za-z0-9+.-]*:/"
_BUCKET = r"^gs://[a-z0-9][\w.-]*[a-z0-9](/|$)"


def is_code(name: object) -> bool:
    """Return whether a name is a user function, my_pkg.model:build."""
    return isinstance(name, str) and bool(re.match(_CODE, name)) and not re.match(HUGGING_FACE, name)


def is_foreign(name: object) -> bool:
    """Return whether a model's name is one of transformers', or a user function."""
    return isinstance(name, str) and bool(re.match(HUGGING_FACE, name) or re.match(_CODE, name))


def is_path(value: object) -> bool:
    """Return whether a value is a path, a gs:// URL or a data set of the Hugging Face hub."""
    if not isinstance(value, str) or not value.strip():
        return False
    if value.startswith("hf:"):
        return bool(re.match(_DATASET, value))
    return not re.match(_SCHEME, value) or bool(re.match(_BUCKET, value))


# --- The table --------------------------------------------------------------------------------------------------------

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
_MINUTES = any_of(one_of("auto", "off"), number(0, 1e6, above=True))
_SECONDS = any_of(one_of("auto", "off"), number(1, 604_800))
_LOGGERS = Rule(lambda v: isinstance(v, (list, tuple)), f"a list of {', '.join(LOGGER_NAMES)}")
_PROFILE = Rule(
    lambda v: v in ("off", False) or (isinstance(v, Mapping) and not check_fields(v, fields_of(Profile), ())),
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

    bucket_mib: Annotated[int | None, any_of(_AUTO, whole(1, 10_000))] = None
    """MiB of gradients sent together; None: chosen by the model's size."""
    static_graph: Annotated[bool | None, _AUTO_OR_FLAG] = None
    """DDP assumes that the same operations run every step; None: where they do."""
    gradient_as_bucket_view: Annotated[bool, FLAG] = True
    """Gradients are views of the communication buckets, instead of being copied there."""


class Loader(NamedTuple):
    """Data loading: worker processes of each rank (None: chosen by the machine and the data), and batches that each one
    prepares ahead."""

    workers: Annotated[int | None, any_of(_AUTO, whole(0, 256))] = None
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
    micro_batch_size: Annotated[int | None, any_of(_AUTO, whole(1, 10_000_000))] = None
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


# --- Validation -------------------------------------------------------------------------------------------------------


def problems(config: Mapping[str, Any]) -> list[Problem]:
    """Return all problems of `config`, in the order of its keys; empty if it is valid."""
    long = expand_short_forms(config)
    invalid = [
        *check_fields(long, FIELDS, ()),
        *_model_problems(long),
        *_data_problems(long),
        *_training_problems(long),
        *_output_problems(long),
        *_logger_problems(long),
    ]
    short = {key for key in long if key not in config or type(config[key]) is not type(long[key])}
    return [(path[:1] if path[0] in short else path, wrong, right) for path, wrong, right in invalid]


def problem_line(problem: Problem) -> str:
    """Return one problem as a line of text."""
    path, wrong, right = problem
    return f"{'.'.join(map(str, path)) or 'run.config'}: {wrong}" + (f"; {right}" if right else "")


def expand_short_forms(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Expand the short forms: `checkpoint: auto` (or off) to `checkpoint: {minutes: auto}`, its `keep: 3` to `keep:
    {last: 3}`, `data: PATH` to `data:
    {path: PATH}`, `init_from: PATH` likewise, `model: NAME` to `model: {name: NAME}`."""
    long = dict(config)
    if isinstance(config.get("checkpoint"), str):
        long["checkpoint"] = {"minutes": config["checkpoint"]}
    elif isinstance(config.get("checkpoint"), Mapping) and type(config["checkpoint"].get("keep")) is int:
        long["checkpoint"] = {**config["checkpoint"], "keep": {"last": config["checkpoint"]["keep"]}}
    for key, inner in (("data", "path"), ("model", "name"), ("init_from", "path")):
        if isinstance(config.get(key), str):
            long[key] = {inner: config[key]}
    return long


# --- Combinations of keys; each function skips values that their own rule rejects -----------------------------------


def user_functions(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user functions that a config names, by key: `model`, `data`, `loss`."""
    long = expand_short_forms(config)
    model, data = ({} if not isinstance(long.get(key), Mapping) else long[key] for key in ("model", "data"))
    names = {"model": model.get("name"), "data": training_path(data), "loss": long.get("loss")}
    return {key: name for key, name in names.items() if is_code(name)}


def local_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the local files and folders that a config names, by key (`data`, `data.val`, `init_from` …)."""
    long = expand_short_forms(config)
    data, weights = (long[key] if isinstance(long.get(key), Mapping) else {} for key in ("data", "init_from"))
    named = {"data": training_path(data), "data.val": data.get("val"), "data.tokenizer": data.get("tokenizer")}
    elsewhere = ("gs://", "hf:", "tiktoken:")
    paths = {
        key: path
        for key, path in named.items()
        if isinstance(path, str)
        and not (path in ("bytes", "synthetic", "python-stdlib") or path.startswith(elsewhere) or is_code(path))
    }
    path = weights.get("path")
    return paths | ({"init_from": path} if isinstance(path, str) and kind_of_weights(path) == "local" else {})


def kind_of_weights(path: str) -> str:
    """Return `run`, `bucket`, `hub` or `local`: where `init_from` finds its weights."""
    kinds = {"bucket": path.startswith("gs://"), "hub": path.startswith("hf:"), "run": bool(re.match(RUN_ID, path))}
    return next((kind for kind, holds in kinds.items() if holds), "local")


def training_path(data: Mapping[str, Any]) -> Any:
    """Return `path`, or `train`, which means the same; None if neither is set."""
    return data.get("path", data.get("train"))


def _model_problems(config: Mapping[str, Any]) -> list[Problem]:
    model = config.get("model", {})
    if not isinstance(model, Mapping):
        return []
    name = model.get("name", "gpt")
    if is_foreign(name):
        fields = fields_of(ExternalModel)
        return check_fields({key: value for key, value in model.items() if key in fields}, fields, ("model",))
    if not isinstance(name, str) or name not in PRESETS:
        known = f"the models are {', '.join(PRESETS)}, hf:TYPE (transformers), or a custom my_pkg.model:build"
        close = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
        wrong = f"unknown model {quote(name)}" if isinstance(name, str) else f"{quote(name)} is not a model name"
        return [(("model", "name"), wrong, close or known)]
    if invalid := check_fields(model, fields_of(kind_of(name)), ("model",)):
        return invalid
    shape = _with_defaults(model)
    if "n_head" not in shape or shape["n_embd"] % shape["n_head"] == 0:
        return []
    wrong = f"{shape['n_embd']} is not divisible by n_head, {shape['n_head']}"
    return [(("model", "n_embd"), wrong, "each head needs the same number of channels")]


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a built-in model."""
    name = settings.get("name", "gpt")
    return {**kind_of(name)()._asdict(), **PRESETS[name], **settings}


def _data_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    data, model = config.get("data", {}), config.get("model", {})
    if not isinstance(model, Mapping) or _model_problems(config) or check_fields({"data": data}, FIELDS, ()):
        return
    path = training_path(data) or "the default"
    if "path" in data and "train" in data:
        yield ("data", "train"), "means the same as path, which is also set", "remove one of them"
    elif "settings" in data and not is_code(path):
        yield ("data", "settings"), "only applies to a custom function", "set path: my_pkg.data:build"
    elif "val" in data and (path in ("the default", "synthetic") or is_code(path)):
        wrong = f"needs a file or a folder to train on, and the data is {path}"
        yield ("data", "val"), wrong, "set data.train; a custom function gets split='held_out'"
    elif not (is_foreign(model.get("name", "gpt")) or path == "synthetic" or is_code(path)):
        shape, name = _with_defaults(model), path.rstrip("/").rpartition("/")[2].lower()
        may_be_tokens = path not in ("the default", "python-stdlib") and (
            "." not in name or name.endswith((".bin", ".npy"))
        )
        if path == "python-stdlib" and "num_classes" in shape:
            wrong = "python-stdlib is text, but resnet50 needs images"
            yield ("data",), wrong, "use a folder of images, or synthetic"
        elif data.get("tokenizer", "bytes") == "bytes" and not may_be_tokens and shape.get("vocab_size", 256) < 256:
            wrong = f"{shape['vocab_size']} is too small"
            yield ("model", "vocab_size"), wrong, "text is read as bytes: use at least 256"


def _training_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield combinations of batch, optimizer and CUDA graphs that don't work."""
    rule, batch, micro = (
        FIELDS["batch_size"],
        config.get("batch_size", DEFAULT.batch_size),
        config.get("micro_batch_size"),
    )
    if rule.holds(batch) and rule.holds(micro) and batch % micro:
        wrong = f"batch_size, {batch}, is not divisible by {micro}"
        yield ("micro_batch_size",), wrong, "batch_size is global: a multiple of ranks x micro_batch_size"
    optimizer, rules = config.get("optimizer"), FIELDS["optimizer"]
    if isinstance(optimizer, Mapping):
        lr, low = optimizer.get("lr", DEFAULT.optimizer.lr), optimizer.get("min_lr")
        if rules["lr"].holds(lr) and rules["min_lr"].holds(low) and low > lr:
            wrong = f"{low} is above lr, {lr}"
            yield ("optimizer", "min_lr"), wrong, "the learning rate falls from lr to min_lr"
        steps, warmup = config.get("steps", DEFAULT.steps), optimizer.get("warmup_steps")
        if rules["warmup_steps"].holds(warmup) and FIELDS["steps"].holds(steps) and warmup > steps:
            wrong = f"{warmup} is above steps, {steps}"
            yield ("optimizer", "warmup_steps"), wrong, "the warm-up must end within the run"
    if config.get("cuda_graphs") is True and config.get("parallel") == "fsdp":
        wrong = "true is not available with parallel: fsdp, which gathers parameters at other addresses in each pass"
        yield ("cuda_graphs",), wrong, "set cuda_graphs: false, or parallel: ddp"
    elif config.get("cuda_graphs") is True and config.get("compile") is False:
        yield ("cuda_graphs",), "true needs the compiler", "set compile: true, or auto"


def _output_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with initial weights, evaluations and the checkpoints that depend on them."""
    init_from, evaluation, checkpoint = (config.get(key) for key in ("init_from", "eval", "checkpoint"))
    if isinstance(init_from, Mapping) and "path" not in init_from:
        yield ("init_from",), "has no path", "set init_from: {path: RUN, strict: false}"
    if not isinstance(evaluation, Mapping):
        return
    no_evaluations = "needs evaluations, and eval.every is 0", "set eval.every"
    keep = checkpoint.get("keep") if isinstance(checkpoint, Mapping) else None
    if isinstance(keep, Mapping) and keep.get("best", 0) and evaluation.get("every") == 0:
        yield ("checkpoint", "keep", "best"), *no_evaluations
    samples, model = evaluation.get("samples", 0), config.get("model", {})
    if not samples or not FIELDS["eval"]["samples"].holds(samples):
        return
    if evaluation.get("every") == 0:
        yield ("eval", "samples"), *no_evaluations
    elif config.get("parallel") == "fsdp":
        wrong = "is not available with parallel: fsdp, where no rank has the whole model"
        yield ("eval", "samples"), wrong, "set eval.samples: 0"
    elif isinstance(model, Mapping) and (wrong := no_samples_of(model.get("name", "gpt"), model.get("task", "auto"))):
        yield ("eval", "samples"), wrong, "set eval.samples: 0"


def no_samples_of(name: object, task: object) -> str:
    """Return why a model has no samples in evaluations, or an empty text if it has."""
    if is_code(name):
        return f"is not available for a custom model ({name}), whose outputs are unknown"
    if task == "masked-lm" or (isinstance(name, str) and name.startswith("bert")):
        return f"is not available for {name}, which predicts hidden tokens and continues no text"
    return ""


def _logger_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    names = config.get("loggers", ())
    for index, name in enumerate(names if isinstance(names, (list, tuple)) else ()):
        if name not in LOGGER_NAMES:
            right = did_you_mean(str(name), LOGGER_NAMES) or f"use {', '.join(LOGGER_NAMES)}"
            yield ("loggers", index), f"unknown logger {quote(name)}", right
        elif name in names[:index]:
            yield ("loggers", index), f"{name} is listed twice", "remove one of them"


def check_fields(config: Mapping[str, Any], fields: Mapping[str, Any], path: KeyPath) -> list[Problem]:
    """Return unknown keys and invalid values of one mapping, and of the mappings in it."""
    invalid: list[Problem] = []
    for key, value in config.items():
        where = (*path, key)
        rule = fields.get(key, _UNKNOWN)
        if rule is _UNKNOWN:
            known = f"available: {', '.join(fields)}"
            invalid.append((where, "unknown setting", did_you_mean(str(key), fields) or known))
        elif isinstance(rule, Rule) and not rule.holds(value):
            close = did_you_mean(value, rule.words) if isinstance(value, str) else ""
            invalid.append((where, f"invalid value {quote(value)}", close or f"must be {rule.description}"))
        elif isinstance(rule, dict) and not isinstance(value, Mapping):
            invalid.append((where, f"{quote(value)} is not a mapping", f"its keys are {', '.join(rule)}"))
        elif isinstance(rule, dict):
            invalid += check_fields(value, rule, where)
    return invalid


_UNKNOWN: Final = object()


def quote(value: object) -> str:
    """Return a value for an error: shortened, and quoted, so that '3' is not taken for 3."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes out (sys.get_int_max_str_digits)
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- Parsing ----------------------------------------------------------------------------------------------------------


def parse(config: Mapping[str, Any]) -> Config:
    """Return the settings with their defaults. Raises ConfigError with all problems."""
    lines = [problem_line(problem) for problem in problems(config)]
    if len(lines) == 1:
        raise ConfigError(f"invalid run.config: {lines[0]}")
    if lines:
        raise ConfigError("invalid run.config:\n" + "\n".join(f"  {text}" for text in lines))
    config = expand_short_forms(config)
    model = _model_settings(config.get("model", {"name": "gpt"}))
    steps = config.get("steps", DEFAULT.steps)
    checkpoint, default = config.get("checkpoint", {}), DEFAULT.checkpoint
    keep = {f"keep_{name}": value for name, value in checkpoint.get("keep", {}).items()}
    optimizer = without_auto(Optimizer, config.get("optimizer", {}))
    optimizer["betas"] = tuple(optimizer.get("betas", DEFAULT.optimizer.betas))
    lr = optimizer.get("lr", DEFAULT.optimizer.lr)
    sections = {
        "model": model,
        "data": _data_settings(config.get("data", {}), model),
        "optimizer": Optimizer(**{"min_lr": lr / 10, "warmup_steps": default_warmup(steps), **optimizer}),
        "loggers": tuple(config.get("loggers", DEFAULT.loggers)),
        "ddp": Ddp(**without_auto(Ddp, config.get("ddp", {}))),
        "loader": Loader(**without_auto(Loader, config.get("loader", {}))),
        "eval": Eval(**config.get("eval", {})),
        "checkpoint": default._replace(minutes=checkpoint.get("minutes", default.minutes), **keep),
        "profile": Profile(**config["profile"]) if config.get("profile", "off") not in ("off", False) else None,
        "init_from": InitFrom(**config["init_from"]) if "init_from" in config else None,
    }
    return Config(**{**without_auto(Config, config), **sections})


def as_data(config: Config) -> dict[str, Any]:
    """Return all settings as plain data, the sections as mappings."""
    return {
        name: {key: dict(item) if isinstance(item, Mapping) else item for key, item in value._asdict().items()}
        if isinstance(value, SECTIONS)
        else value
        for name, value in config._asdict().items()
    }


def _model_settings(settings: Mapping[str, Any]) -> Shape:
    name = settings.get("name", "gpt")
    if is_foreign(name):
        own = {key: settings[key] for key in fields_of(ExternalModel) if key in settings}
        return ExternalModel(name, {key: value for key, value in settings.items() if key not in ("name", *own)}, **own)
    return kind_of(name)(**{**PRESETS[name], **settings, "name": name})


def _data_settings(settings: Mapping[str, Any], model: Shape) -> Data:
    rest = {key: value for key, value in settings.items() if key != "train"}
    default = "python-stdlib" if isinstance(model, Gpt | Bert) else "synthetic"
    return Data(**{**rest, "path": training_path(settings) or default})


def is_resumable(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a run with the config `before` may be resumed with `now`: `steps` may grow, and CHANGEABLE
    settings may change. Both are as in a spec, without defaults."""
    if problems(before) or problems(now):
        return False
    old, new = parse(before), parse(now)
    same = {name: getattr(new, name) for name in CHANGEABLE}
    optimizer = old.optimizer
    if not any("warmup_steps" in config.get("optimizer", {}) for config in (before, now)):
        optimizer = optimizer._replace(warmup_steps=new.optimizer.warmup_steps)
    return new.steps >= old.steps and old._replace(**same, steps=new.steps, optimizer=optimizer) == new


def default_warmup(steps: int) -> int:
    """Return the default of `optimizer.warmup_steps`: at most a tenth of the steps."""
    return min(DEFAULT.optimizer.warmup_steps, steps // 10)

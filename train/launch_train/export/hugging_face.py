"""Export to Hugging Face's layout: `AutoModel.from_pretrained` loads it, and its Trainer resumes from it.

The included gpt is transformers' GPT2 and bert its BertForMaskedLM: the same computation under other names. Models of
transformers keep their own names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from launch_train.checkpointing.manifest import Manifest
from launch_train.checkpointing.partition import State
from launch_train.common.config import Gpt, Optimizer, kind_of
from launch_train.common.errors import UsageError
from launch_train.export import formats
from launch_train.export.formats import copied, empty, state_of
from launch_train.models.bert import NORM
from launch_train.models.hugging_face import HEADS, NOT_THEIRS
from launch_train.performance.optimizer import learning_rate


class ParameterSource(NamedTuple):
    """Where a parameter of transformers comes from: ours, perhaps transposed, or one of several equal parts of it."""

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """Return the values in transformers' layout: of the parameter, or of its moments."""
        own = tensor.chunk(self.parts)[self.part]
        return own.t() if self.transposed else own


class Recipe(NamedTuple):
    """A model of transformers: its class, its config, and the sources of its parameters (others are 0)."""

    kind: str
    config: Mapping[str, Any]
    sources: Mapping[str, ParameterSource] | None = None
    """None: the names are the same."""
    prefix: str = ""
    """Prefix of our names."""

    def source(self, name: str) -> ParameterSource | None:
        source = ParameterSource(name) if self.sources is None else self.sources.get(name)
        return source and source._replace(name=self.prefix + source.name)


def prepare(about: Mapping[str, Any], *, weights_only: bool) -> formats.Writer:
    """Return the writer. Raises UsageError if transformers has no such model, or the optimizer's state can't be
    exported."""
    recipe = _recipe(about)
    return partial(_write, recipe, None if weights_only else formats.trained(about))


def _recipe(about: Mapping[str, Any]) -> Recipe:
    if formats.is_script(about):
        raise UsageError(
            "a custom script's model can't be exported as hf: launch doesn't know its transformers class; use "
            "--format safetensors or torch, and load it into the class yourself"
        )
    in_loss = "model." if about["config"]["loss"] else ""  # a custom loss has the model inside
    if "hf" in about:
        return _recipe_of_transformers(about["hf"]["class"], about["hf"]["config"], f"{in_loss}model.")
    model = about["config"]["model"]
    _check_counts(model)
    name = model["name"]
    if ":" in name or name == "resnet50":
        raise UsageError(
            f"model {name} can't be exported as hf: transformers has no class that computes the same; use "
            "--format safetensors or torch"
        )
    return (_gpt2(model) if kind_of(name) is Gpt else _bert(model))._replace(prefix=in_loss)


def _recipe_of_transformers(kind: str, config: Mapping[str, Any], prefix: str) -> Recipe:
    """Return the recipe of a model that the trainer builds, with the fields that its config class declares.

    Whoever can write to the run folder has written both. Other classes could do anything, and other settings load code
    from the hub (attn_implementation, auto_map). Raises UsageError.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = (getattr(modeling_auto, table) for _, table in HEADS.values())
    known = [table.get(config["model_type"], ()) for table in tables]
    if kind not in {name for names in known for name in ((names,) if isinstance(names, str) else names)}:
        raise UsageError(
            f"transformers' {config['model_type']!s:.40} has no class {kind!s:.60} that the trainer builds; use "
            "--format safetensors or torch"
        )
    _check_counts(config)
    return Recipe(kind, _declared(CONFIG_MAPPING[config["model_type"]], config, CONFIG_MAPPING), prefix=prefix)


def _declared(kind: Any, config: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a config class declares, and its sub-configs that those declare."""
    names = {field.name for field in dataclasses.fields(kind)} - NOT_THEIRS | {"model_type"}
    settings = {name: value for name, value in config.items() if name in names}
    for name, inner in kind.sub_configs.items():
        if isinstance(value := settings.get(name), Mapping):
            settings[name] = _declared(
                inner if dataclasses.is_dataclass(inner) else types[value["model_type"]], value, types
            )
    return settings


def _check_counts(config: Any) -> None:
    """Raise UsageError for more layers than any model has: building them would never end."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        counts = value if isinstance(value, list) else [value]
        if COUNT.search(name) and any(isinstance(count, int) and count > MOST_LAYERS for count in counts):
            raise UsageError(
                f"the checkpoint's model has {name}: {value!s:.40}, and at most {MOST_LAYERS} are exported"
            )
        _check_counts(value)


COUNT: Final = re.compile("layer|depth|expert|stage")
MOST_LAYERS: Final = 10_000


def _gpt2(model: Mapping[str, Any]) -> Recipe:
    """GPT2 with the exact GELU. Its linear layers are stored transposed (Conv1D); biases that ours lacks are 0."""
    config = {
        "model_type": "gpt2",
        **{key: model[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")},
        "n_positions": model["block_size"],
        "activation_function": "gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model["dropout"]),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    names = {"wte": "tokens", "wpe": "positions", "ln_f": "norm"}
    inner = {"ln_1": "norm_1", "ln_2": "norm_2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out"}
    inner |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.out"}
    names |= {f"h.{n}.{a}": f"blocks.{n}.{b}" for n in range(model["n_layer"]) for a, b in inner.items()}
    sources = {}
    for theirs, ours in names.items():
        sources[f"transformer.{theirs}.weight"] = ParameterSource(f"{ours}.weight", transposed=".c_" in theirs)
        if model["bias"] and ours not in ("tokens", "positions"):
            sources[f"transformer.{theirs}.bias"] = ParameterSource(f"{ours}.bias")
    return Recipe("GPT2LMHeadModel", config, sources)


def _bert(model: Mapping[str, Any]) -> Recipe:
    config = {
        "model_type": "bert",
        "num_hidden_layers": model["n_layer"],
        "num_attention_heads": model["n_head"],
        "hidden_size": model["n_embd"],
        "intermediate_size": 4 * model["n_embd"],
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": model["block_size"],
        "hidden_act": "gelu",
        "layer_norm_eps": NORM,
        "pad_token_id": None,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), model["dropout"]),
    }
    return Recipe("BertForMaskedLM", config, dict(_bert_sources(model["n_layer"])))


def _bert_sources(layers: int) -> Iterator[tuple[str, ParameterSource]]:
    embeddings = {"word_embeddings": "tokens", "position_embeddings": "positions", "token_type_embeddings": "types"}
    for theirs, ours in embeddings.items():
        yield f"bert.embeddings.{theirs}.weight", ParameterSource(f"{ours}.weight")
    modules = {"bert.embeddings.LayerNorm": "norm", "cls.predictions.transform.dense": "transform"}
    modules |= {"cls.predictions.transform.LayerNorm": "head_norm"}
    inner = {"attention.output.dense": "attention.out", "attention.output.LayerNorm": "norm_1"}
    inner |= {"intermediate.dense": "up", "output.dense": "out", "output.LayerNorm": "norm_2"}
    for layer in range(layers):
        modules |= {f"bert.encoder.layer.{layer}.{a}": f"blocks.{layer}.{b}" for a, b in inner.items()}
    for kind in ("weight", "bias"):
        yield from ((f"{theirs}.{kind}", ParameterSource(f"{ours}.{kind}")) for theirs, ours in modules.items())
        for layer in range(layers):
            for part, theirs in enumerate(("query", "key", "value")):
                qkv = ParameterSource(f"blocks.{layer}.attention.qkv.{kind}", part=part, parts=3)
                yield f"bert.encoder.layer.{layer}.attention.self.{theirs}.{kind}", qkv
    yield "cls.predictions.bias", ParameterSource("head.bias")


# --- Writing ----------------------------------------------------------------------------------------------------------


def _write(
    recipe: Recipe,
    names: Sequence[str] | None,
    manifest: Manifest,
    shards: Sequence[Mapping[str, Any]],
    scratch: Path,
    folder: Path,
) -> list[str]:
    """Write config and weights, and with the `names` of the trained parameters what transformers' Trainer resumes
    from: optimizer.pt, scheduler.pt and trainer_state.json."""
    theirs = _empty_model(recipe)
    state = state_of(shards, scratch)
    theirs.config.architectures = [recipe.kind]
    theirs.config.dtype = torch.float32
    theirs.config.save_pretrained(folder)
    # What from_pretrained expects: parameters, each tied one once, and the buffers of the state dict.
    parameters, buffers = dict(theirs.named_parameters()), dict(theirs.named_buffers())
    stored = parameters | {name: buffers[name] for name in theirs.state_dict() if name in buffers}
    weights = {name: _weight(recipe, name, like, state["model"], scratch) for name, like in stored.items()}
    formats.save_safetensors(weights, folder / "model.safetensors")
    if names is None:
        return []
    from transformers import Trainer
    from transformers.trainer_callback import TrainerState

    config = manifest.about["config"]
    settings = Optimizer(**config["optimizer"])
    following = learning_rate(min(manifest.step + 1, config["steps"]), config["steps"], settings)
    # In the order of transformers' Trainer: first what decays, then the rest.
    decaying = set(Trainer.get_decay_parameter_names(None, theirs))
    decay_first = sorted(parameters, key=lambda name: name not in decaying)
    saved = state["optimizer"]
    ours = {name: saved["state"][number] for number, name in enumerate(names) if number in saved["state"]}
    moments = {
        number: _moments(recipe.source(name), parameters[name], ours, scratch)
        for number, name in enumerate(decay_first)
    }
    common = {key: value for key, value in saved["param_groups"][0].items() if key != "params"}
    common |= {"lr": following, "initial_lr": settings.lr}
    first = sum(name in decaying for name in parameters)
    groups = [
        {**common, "weight_decay": settings.weight_decay, "params": [*range(first)]},
        {**common, "weight_decay": 0.0, "params": [*range(first, len(parameters))]},
    ]
    torch.save({"state": moments, "param_groups": groups}, folder / "optimizer.pt")
    scheduler = {"base_lrs": [settings.lr] * 2, "last_epoch": manifest.step, "_step_count": manifest.step + 1}
    scheduler |= {"_last_lr": [following] * 2, "lr_lambdas": [None] * 2, "_get_lr_called_within_step": False}
    torch.save(scheduler, folder / "scheduler.pt")
    past = TrainerState(
        global_step=manifest.step,
        max_steps=config["steps"],
        train_batch_size=config["batch_size"],
        logging_steps=config["log_every"],  # transformers goes by these rather than by its own arguments
        eval_steps=config["eval"]["every"] or config["steps"],
    )
    past.save_to_json(str(folder / "trainer_state.json"))
    return []


def _empty_model(recipe: Recipe) -> Any:
    """Return the model without memory: its names, shapes and config."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    settings = {key: value for key, value in recipe.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(recipe.config["model_type"], **settings)
    with torch.device("meta"):
        return getattr(transformers, recipe.kind)(config)


def _weight(recipe: Recipe, name: str, like: Tensor, ours: Mapping[str, Tensor], scratch: Path) -> Tensor:
    """Return a tensor in transformers' layout. Raises UsageError if its shape is not the model's."""
    source = recipe.source(name)
    if source is None:
        return empty(like.shape, torch.float32, scratch)
    if source.name not in ours:
        raise UsageError(f"the checkpoint has no {source.name}, which transformers' {recipe.kind} needs")
    value = source.of(ours[source.name])
    if value.shape != like.shape:
        raise UsageError(
            f"{source.name} is {list(value.shape)} in the checkpoint and {list(like.shape)} in transformers' "
            f"{recipe.kind} (another version of transformers?)"
        )
    return value if value.is_contiguous() and source.parts == 1 else copied(value, scratch)


def _moments(source: ParameterSource | None, like: Tensor, ours: Mapping[str, State], scratch: Path) -> State:
    """Return a parameter's moments in transformers' layout.

    A bias that ours lacks must stay 0, or the loss would differ from the first step on: an infinite second moment makes
    each of AdamW's updates 0.
    """
    if source is not None and source.name in ours:
        return {
            key: copied(source.of(value), scratch) if value.dim() else value.clone()
            for key, value in ours[source.name].items()
        }
    return {
        key: torch.full(like.shape, inf if key == "exp_avg_sq" else 0.0) if value.dim() else value.clone()
        for key, value in next(iter(ours.values()), {}).items()
    }

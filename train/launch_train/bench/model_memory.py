"""Measure a model without computing it: `python -m launch_train.bench.model_memory RESULT`, with run.config on stdin.

The model is built and run on fake tensors, which have shapes and no memory. What it allocates besides (NumPy arrays,
lists) is real, so the process limits its own memory first. `launch estimate` runs this, with a time limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from launch_train.common.errors import TrainError, UsageError

MEMORY: Final = 6 * 2**30
"""Bytes that the process may allocate: torch itself takes about one GiB."""
SAMPLES: Final = (1, 2)
"""Batches that are compared: what the second one keeps more is what a sample keeps."""


def main() -> None:
    """Write the measured sizes to the file RESULT, or `error`, one line."""
    limit_memory()
    try:
        result = measure(json.load(sys.stdin))
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        result = {"error": explained(error)}
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


OUT_OF_MEMORY: Final = f"the model or its data allocates more than {MEMORY / 1e9:.1f} GB of real memory"


def explained(error: BaseException) -> str:
    from launch_train.common.user_import import describe_error

    if any(isinstance(cause, MemoryError) or "can't allocate memory" in str(cause) for cause in causes(error)):
        return OUT_OF_MEMORY
    return str(error) if isinstance(error, TrainError) else f"the model failed {describe_error(error)}"


def causes(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def limit_memory() -> None:
    """Limit the memory of this process. Windows and macOS have no such limit that works."""
    try:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        return


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's numbers of parameters and FLOPs, and the bytes that a sample keeps, in fp32 and in bf16.

    Raises UsageError as the trainer would.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from launch_train import models
    from launch_train.common.config import ExternalModel, parse
    from launch_train.data.batch import map_tensors
    from launch_train.models.introspection import count_flops
    from launch_train.performance.activation_checkpointing import checkpoint_blocks

    config = parse(settings)
    if isinstance(config.model, ExternalModel) and config.model.pretrained:
        raise UsageError(f"model: {config.model.name}: pretrained weights are not downloaded for an estimate")
    config = models.resolve_task(config)._replace(batch_size=max(SAMPLES))
    source = open_source(config)
    batches = [source.finish(source.train(1, slice(0, count))) for count in SAMPLES]

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = models.build_model(config, source).train()
        data = [map_tensors(batch, fake) for batch in batches]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        blocks = models.blocks(model)
        sizes = [[parameter.numel() for parameter in block.parameters()] for block in blocks]
        result = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "trained": sum(parameter.numel() for parameter in trained),
            "matrices": sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2),
            "blocks": len(blocks),
            "block": max(map(sum, sizes), default=0),
            "in_blocks": sum(map(sum, sizes)),
            "units": source.per_sample,
            "unit": source.unit,
            "flops": count_flops(model, *data[0]) or 0.0,
            "fp32": kept(model, data, half=False),
            "half": kept(model, data, half=True),
        }
        if blocks:
            checkpoint_blocks(model, "full")
            for name, half in (("entries_fp32", False), ("entries_half", True)):
                result[name] = kept(model, data, half=half)[0]
    return result


def open_source(config: Any) -> Any:
    """Return the custom data, or random data of the same shape as the spec's, which is not read."""
    from launch_train.common.config import user_functions
    from launch_train.data import open_data
    from launch_train.distributed.process_group import Ranks

    if "data" not in user_functions({"data": config.data.path}):
        config = config._replace(data=config.data._replace(path="synthetic", val=None))
    return open_data(config, Ranks())


def kept(model: Any, batches: list[Any], *, half: bool) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps for each sample, and the largest array of these."""
    of_one, of_two = (saved(model, batch, half=half) for batch in batches)
    return sum(of_two) - sum(of_one), max(of_two, default=0) - max(of_one, default=0)


def saved(model: Any, batch: Any, *, half: bool) -> list[int]:
    """Return the bytes of each array that autograd keeps besides parameters and buffers."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(*batch)
    del loss
    return [storage.nbytes() for storage in storages.values()]


if __name__ == "__main__":
    main()

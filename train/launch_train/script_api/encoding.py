"""Encode a custom script's values as tensors and plain values: a checkpoint holds no pickled code.

Bytes and NumPy arrays become byte tensors. A mapping whose keys can't be used in paths becomes a list of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from launch_train.common.errors import UsageError
from launch_train.distributed import dtensor

ARRAY: Final = "$array"
BYTES: Final = "$bytes"
ITEMS: Final = "$items"
"""The only key of a dict that represents an array, for bytes, or for a mapping."""

KINDS: Final = frozenset("biufcSUmM")
"""Supported kinds of NumPy dtypes: numbers, text and times; not objects or records."""


def encode(value: Any, where: str = "state") -> Any:
    """Return `value` as a checkpoint stores it. Raises UsageError, with the path, if it can't."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor(value, where)
    if isinstance(value, np.ndarray | np.generic):
        return _array(value, where)
    if isinstance(value, Mapping):
        items = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
        names = [str(key) for key in value]
        can_be_paths = len(set(names)) == len(names) and not any("/" in name or name.startswith("$") for name in names)
        return dict(items) if can_be_paths else {ITEMS: [list(item) for item in items]}
    if isinstance(value, list | tuple):
        parts = [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, bytes):
        return {BYTES: _tensor_of(value)}
    if value is None or type(value) in (bool, int, float, complex, str, torch.dtype, torch.device):
        return value
    raise UsageError(_unsupported(value, where))


def decode(value: Any) -> Any:
    """Return the value that `encode` was given; mappings become dicts."""
    if isinstance(value, Mapping):
        if value.keys() == {ARRAY}:
            return _from_bytes(**value[ARRAY])
        if value.keys() == {BYTES}:
            return value[BYTES].numpy().tobytes()
        if value.keys() == {ITEMS}:
            return {key: decode(item) for key, item in value[ITEMS]}
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([decode(item) for item in value])
    return value


def _tensor(value: Any, where: str) -> Any:
    if dtensor.is_sharded(value):
        try:
            dtensor.local_region(value)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from error
    elif str(value.layout) != "torch.strided":
        raise UsageError(_unsupported(value, where))
    return value.detach()


def _array(value: Any, where: str) -> dict[str, Any]:
    import numpy as np

    if value.dtype.kind not in KINDS:
        raise UsageError(_unsupported(value, where))
    description = {"dtype": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
    return {ARRAY: {**description, "content": _tensor_of(value.tobytes())}}


def _tensor_of(content: bytes) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


def _from_bytes(dtype: str, shape: list[int], scalar: bool, content: Any) -> Any:
    import numpy as np

    array = np.frombuffer(content.numpy().tobytes(), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


def _unsupported(value: Any, where: str) -> str:
    return (
        f"{where} is a {type(value).__name__}, which a checkpoint can't store. Use numbers, text, bytes, tensors, "
        "NumPy arrays, lists, tuples and dicts of them, or objects with state_dict() and load_state_dict()"
    )

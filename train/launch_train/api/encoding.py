"""What a script of your own may keep in a checkpoint, as tensors and plain values: a checkpoint holds no pickled code.

Bytes and NumPy's arrays become tensors of bytes; a mapping whose keys don't make good paths becomes a list of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from launch_train.common.errors import UsageError
from launch_train.distributed import dtensor

ARRAY: Final = "$array"
BYTES: Final = "$bytes"
ITEMS: Final = "$items"
"""The only key of a dict that stands for an array, for bytes, or for a mapping."""

KINDS: Final = frozenset("biufcSUmM")
"""Of NumPy's types: numbers, text and times; not objects, nor records."""


def encoded(value: Any, where: str = "state") -> Any:
    """`value` as a checkpoint holds it. Raises UsageError, with the place, if it can't."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor(value, where)
    if isinstance(value, np.ndarray | np.generic):
        return _array(value, where)
    if isinstance(value, Mapping):
        items = [(key, encoded(item, f"{where}[{key!r}]")) for key, item in value.items()]
        return dict(items) if _are_names(value) else {ITEMS: [list(item) for item in items]}
    if isinstance(value, list | tuple):
        parts = [encoded(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, bytes):
        return {BYTES: _tensor_of(value)}
    if value is None or type(value) in (bool, int, float, complex, str, torch.dtype, torch.device):
        return value
    raise UsageError(_refusal(value, where))


def decoded(value: Any) -> Any:
    """What `encoded` was given; mappings are dicts."""
    if isinstance(value, Mapping):
        if value.keys() == {ARRAY}:
            return _from_bytes(**value[ARRAY])
        if value.keys() == {BYTES}:
            return value[BYTES].numpy().tobytes()
        if value.keys() == {ITEMS}:
            return {key: decoded(item) for key, item in value[ITEMS]}
        return {key: decoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([decoded(item) for item in value])
    return value


def _are_names(mapping: Mapping[Any, Any]) -> bool:
    """Whether no two of its keys, nor those of mappings in it, can make the same path of a tensor."""
    names = [str(key) for key in mapping]
    return len(set(names)) == len(names) and not any("/" in name or name.startswith("$") for name in names)


def _tensor(value: Any, where: str) -> Any:
    if dtensor.is_shared_out(value):
        try:
            dtensor.place(value)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from error
    elif str(value.layout) != "torch.strided":
        raise UsageError(_refusal(value, where))
    return value.detach()


def _array(value: Any, where: str) -> dict[str, Any]:
    import numpy as np

    if value.dtype.kind not in KINDS:
        raise UsageError(_refusal(value, where))
    about = {"dtype": value.dtype.str, "shape": list(value.shape), "scalar": isinstance(value, np.generic)}
    return {ARRAY: {**about, "content": _tensor_of(value.tobytes())}}


def _tensor_of(content: bytes) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


def _from_bytes(dtype: str, shape: list[int], scalar: bool, content: Any) -> Any:
    import numpy as np

    array = np.frombuffer(content.numpy().tobytes(), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


def _refusal(value: Any, where: str) -> str:
    return (
        f"{where} is a {type(value).__name__}, which a checkpoint can't hold. It holds numbers, text, bytes, tensors, "
        "NumPy arrays, lists, tuples and dicts of them, and what has state_dict() and load_state_dict()"
    )

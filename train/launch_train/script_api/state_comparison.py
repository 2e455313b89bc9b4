"""Compare the states of the ranks before a checkpoint, which holds one state and of which each rank writes a part.

The ranks exchange digests through the store and not by a collective, so a rank that never calls `checkpoint.save` can
be named, and no collective hangs. Each save costs one digest per rank; it can't be cached, as no rank can know whether
another rank's state has changed since. Layouts are exchanged only when the digests differ.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from torch import Tensor

from launch_train.checkpointing.partition import REF, split
from launch_train.common.console import say
from launch_train.common.errors import SupersededError, TrainError, UsageError
from launch_train.distributed import dtensor
from launch_train.distributed.process_group import Ranks, wait_for_keys
from launch_train.script_api import encoding as plain

T = TypeVar("T")

SHOWN: Final = 3
"""Differences that a message lists."""


class ComparedValue(NamedTuple):
    """The content of one path of a state. `kind` is its type, dtype and shape, `value` a plain value as text. If it is
    `plain` (a number, text, bytes, a tensor without dimensions), rank 0's may be saved for all ranks."""

    kind: str
    value: str
    plain: bool

    def __str__(self) -> str:
        return f"{self.value} ({self.kind})" if self.value else self.kind


Layout = dict[str, ComparedValue]
"""A state by path, as `model/layers.0.weight`."""


class Comparison:
    """The comparisons of one process with its peers: all ranks call `agree` the same number of times."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rounds = 0
        self._settled: set[str] = set()

    @property
    def settled(self) -> frozenset[str]:
        """Paths at which the ranks differ in a plain value. Rank 0's is saved."""
        return frozenset(self._settled)

    def agree(self, prepare: Callable[[], tuple[T, Layout]]) -> T:
        """Return the result of `prepare`, once all ranks have prepared states of one layout.

        Raises, on all ranks alike, UsageError if the layouts differ in more than plain values, and the error that
        `prepare` raised on one of them; on that rank the error itself.
        """
        try:
            prepared, layout = prepare()
        except Exception as error:
            kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), TrainError.__name__)
            self._exchange(_FAILED + json.dumps([kind, str(error)]))
            raise
        replies = self._exchange(self._digest(layout))
        for rank, reply in enumerate(replies):
            if reply.startswith(_FAILED):
                kind, text = json.loads(reply.removeprefix(_FAILED))
                raise _KINDS[kind](f"rank {rank}: {text}")
        if len(set(replies)) > 1:
            self._settle(layout)
        return prepared

    def _digest(self, layout: Layout) -> str:
        rest = sorted((path, *entry) for path, entry in layout.items() if not (entry.plain and path in self._settled))
        return hashlib.sha256(json.dumps(rest).encode()).hexdigest()

    def _settle(self, layout: Layout) -> None:
        """Find out where the ranks differ. All reach the same result, as all see the same differences."""
        rank = self._ranks.rank
        first = _parse_layout(self._exchange("" if rank else json.dumps(layout))[0])
        mine = {path: entry for path, entry in layout.items() if first.get(path) != entry}
        mine |= dict.fromkeys(first.keys() - layout.keys(), MISSING)
        others = [_parse_layout(message) for message in self._exchange(json.dumps(mine))]
        differences: dict[str, dict[int, ComparedValue]] = {}
        for other, entries in enumerate(others):
            for path, entry in entries.items():
                differences.setdefault(path, {0: first.get(path, MISSING)})[other] = entry
        if hard := {path: who for path, who in differences.items() if not all(entry.plain for entry in who.values())}:
            raise UsageError(
                f"the state differs between the ranks: {_format_differences(hard)}. "
                "A checkpoint holds one state for all ranks: make it the same on all of them, "
                "or pass per-rank values in own={…}"
            )
        if (new := {path: who for path, who in differences.items() if path not in self._settled}) and rank == 0:
            line = f"the state differs between the ranks: {_format_differences(new)}"
            say(f"warning: {line}. Rank 0's value is saved for all ranks")
        self._settled |= differences.keys()

    def _exchange(self, message: str) -> list[str]:
        store, rank = self._ranks.store, self._ranks.rank
        if store is None:
            return [message]
        self._rounds += 1
        prefix = f"compare/{self._rounds}"
        keys = [f"{prefix}/{other}" for other in range(self._ranks.world)]
        store.set(keys[rank], zlib.compress(message.encode()))  # type: ignore[arg-type]  # it takes bytes too

        def late() -> None:
            missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
            if missing and store.add(f"{prefix}/late", 1) == 1:
                others = ", ".join(missing)
                line = f"rank {rank} is still waiting for rank {others} to call the same checkpoint function"
                say(f"warning: {line}: all ranks must call restore, due and save")

        wait_for_keys(store, keys, late)
        messages = [zlib.decompress(text).decode() for text in store.multi_get(keys)]
        store.delete_key(f"compare/{self._rounds - 1}/{rank}")  # all ranks have read it: they are in this round
        return messages


MISSING: Final = ComparedValue("missing", "", plain=True)

_FAILED: Final = "!"
_KINDS: Final = {kind.__name__: kind for kind in (UsageError, SupersededError, TrainError)}


def _parse_layout(message: str) -> Layout:
    return {path: ComparedValue(*entry) for path, entry in json.loads(message or "{}").items()}


def _format_differences(differences: Mapping[str, Mapping[int, ComparedValue]]) -> str:
    """Return the differences as text: `best is 0.5 (float) on rank 0 and 9.0 (float) on rank 1`."""
    lines = []
    for path, who in sorted(differences.items())[:SHOWN]:
        ranks: dict[str, list[str]] = {}
        for rank, entry in sorted(who.items()):
            ranks.setdefault(str(entry), []).append(str(rank))
        named = {text: ", ".join(those[:4]) + (", …" if len(those) > 4 else "") for text, those in ranks.items()}
        lines.append(f"{path} is " + " and ".join(f"{text} on rank {those}" for text, those in named.items()))
    more = len(differences) - SHOWN
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


# --- The layout of a state --------------------------------------------------------------------------------------------


def layout_of(content: Mapping[str, Any], generators: Collection[str] = (), strict: bool = False) -> Layout:
    """Return the layout of an encoded state. `generators` are the names that hold a generator's state, which counts as
    `plain` unless `strict`."""
    tensors, rest = split(content)
    layout = dict(_entries(rest, "", tensors))
    for name in generators:
        state = tensors[rest[name][REF]]
        layout[name] = ComparedValue("generator", f"state {zlib.crc32(state.numpy().tobytes()):08x}", plain=not strict)
    return layout


def _entries(value: Any, path: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, ComparedValue]]:
    if isinstance(value, Mapping) and value.keys() == {REF}:
        yield path, _tensor_entry(path, value[REF], tensors)
    elif isinstance(value, Mapping) and value.keys() == {plain.BYTES}:
        content = tensors[value[plain.BYTES][REF]].numpy().tobytes()
        yield path, ComparedValue("bytes", f"{len(content)} bytes, CRC {zlib.crc32(content):08x}", plain=True)
    elif isinstance(value, Mapping) and value.keys() == {plain.ARRAY}:
        yield path, _array_entry(value[plain.ARRAY], tensors)
    elif isinstance(value, Mapping | list | tuple) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _entries(item, f"{path}/{key}" if path else str(key), tensors)
    else:
        yield path, ComparedValue(type(value).__name__, _shorten(repr(value)), plain=True)


def _tensor_entry(path: str, saved_as: str, tensors: Mapping[str, Tensor]) -> ComparedValue:
    """Return a tensor's entry. Tied tensors are saved once, so the layout includes which ones are tied."""
    tensor = tensors[saved_as]
    kind = f"tensor {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if dtensor.is_sharded(tensor):
        return ComparedValue(f"{kind} sharded by {tuple(cast(Any, tensor).placements)}", "", plain=False)
    tied = "" if saved_as == path else f" tied to {saved_as}"
    return ComparedValue(kind + tied, "", plain=tensor.dim() == 0)


def _array_entry(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ComparedValue:
    dtype = np.dtype(about["dtype"])
    if not about["scalar"]:
        return ComparedValue(f"array {dtype} {about['shape']}", "", plain=False)
    number = plain.decode({plain.ARRAY: {**about, "content": tensors[about["content"][REF]]}})
    return ComparedValue(f"NumPy {dtype}", _shorten(repr(number.item())), plain=True)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}… (CRC {zlib.crc32(text.encode()):08x})"

"""What was measured, as data. Standard library only: judged, shown and read without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

PARTS: Final = ("matmul", "memory", "host", "allreduce", "amp", "loader")
"""What can be measured, in this order."""

SCHEMA: Final = 1
"""Of the JSON."""


class Figure(NamedTuple):
    """One figure: more is better, in every one of them."""

    name: str
    value: float
    unit: str


class Trouble(NamedTuple):
    """A part that could not be measured, and why, in a line."""

    part: str
    why: str


class Measured(NamedTuple):
    """What one rank measured. `gpu` is its number on its node; `pcie` the link's generation and lanes, where known;
    `seconds` how long each part took."""

    rank: int
    node: int
    gpu: int
    host: str
    device: str
    figures: tuple[Figure, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    pcie: tuple[int, int] | None = None
    seconds: Mapping[str, float] = {}

    def value(self, name: str) -> float | None:
        """The figure of that name; None if it has none."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def to_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "rank": self.rank,
            "node": self.node,
            "gpu": self.gpu,
            "host": self.host,
            "device": self.device,
            "figures": {one.name: {"value": one.value, "unit": one.unit} for one in self.figures},
            "troubles": [one._asdict() for one in self.troubles],
            "pcie": list(self.pcie) if self.pcie else None,
            "seconds": dict(self.seconds),
        }


def names(ranks: Sequence[Measured]) -> dict[str, str]:
    """All figures' names with their units, in the order in which they were measured."""
    return {figure.name: figure.unit for rank in ranks for figure in rank.figures}


def values(ranks: Sequence[Measured], name: str) -> list[float]:
    """That figure of each rank that has it."""
    return [value for rank in ranks if (value := rank.value(name)) is not None]

"""Data classes for measurements. Standard library only, so that they can be read and judged without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

PARTS: Final = ("matmul", "memory", "host", "allreduce", "amp", "loader")
"""Parts of the benchmark, in the order in which they run."""

SCHEMA: Final = 1
"""Schema version of the JSON."""


class BenchFigure(NamedTuple):
    """One figure. Higher is always better."""

    name: str
    value: float
    unit: str


class Trouble(NamedTuple):
    """A part that could not be measured, and the reason in one line."""

    part: str
    why: str


class Measured(NamedTuple):
    """Measurements of one rank.

    `gpu`: index on its node; `pcie`: the link's generation and lanes, if known; `seconds`: duration of each part.
    """

    rank: int
    node: int
    gpu: int
    host: str
    device: str
    figures: tuple[BenchFigure, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    pcie: tuple[int, int] | None = None
    seconds: Mapping[str, float] = {}

    def value(self, name: str) -> float | None:
        """Return the figure's value, or None if it wasn't measured."""
        return next((figure.value for figure in self.figures if figure.name == name), None)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def title(self) -> str:
        return f"{'GPU' if self.on_gpu else 'process'} {self.gpu} of node {self.node}"

    def to_dict(self) -> dict[str, Any]:
        """Return the data for the JSON."""
        figures = {figure.name: {"value": figure.value, "unit": figure.unit} for figure in self.figures}
        return {**self._asdict(), "figures": figures, "troubles": [trouble._asdict() for trouble in self.troubles]}


def names(ranks: Sequence[Measured]) -> dict[str, str]:
    """Return the names of all figures with their units, in the order of measurement."""
    return {figure.name: figure.unit for rank in ranks for figure in rank.figures}


def values(ranks: Sequence[Measured], name: str) -> list[float]:
    """Return the figure's values from all ranks that have it."""
    return [value for rank in ranks if (value := rank.value(name)) is not None]

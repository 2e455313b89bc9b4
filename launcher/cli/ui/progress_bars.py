"""How far building and pushing are: bars in a terminal, plain lines elsewhere, all on stderr."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self

from launcher.text import size_text

if TYPE_CHECKING:
    from launcher.images.dependency_image import Report


class Lines:
    """Lines alone: each layer is told once, when it has gone."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()
        """Layers are sent at once, each by a thread of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        """Say something."""
        print(f"launch: {text}", file=sys.stderr, flush=True)

    def layer(self, name: str, done: int, size: int) -> None:
        """So many bytes of a layer have gone."""
        with self._lock:
            if size and done >= size and name not in self._told:
                self._told.add(name)
                self.line(f"sent {name} ({size_text(size)})")


class Bars(Lines):
    """A bar for each layer, by rich, which Typer brings along; loaded when the first bytes move."""

    def __init__(self) -> None:
        super().__init__()
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def line(self, text: str) -> None:
        """Say something, above the bars."""
        if self._progress:
            self._progress.console.print(f"launch: {text}", markup=False, highlight=False)
        else:
            super().line(text)

    def layer(self, name: str, done: int, size: int) -> None:
        """Move the layer's bar."""
        if not size:
            return
        with self._lock:
            if not self._progress:
                self._progress = bars()
                self._progress.start()  # known by then, so that Ctrl-C at any moment gives the cursor back
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=size)
        self._progress.update(self._tasks[name], completed=done, total=size)


def bars() -> Any:
    """Bars on stderr. NO_COLOR is rich's own business."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", table_column=None)
    return Progress(name, BarColumn(20), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True))


def progress() -> Lines:
    """Bars where somebody looks, else lines."""
    return Bars() if sys.stderr.isatty() else Lines()


def report(to: Lines) -> Report:
    """The seam that apply reports through."""
    from launcher.images.dependency_image import Report

    return Report(line=to.line, layer=to.layer)

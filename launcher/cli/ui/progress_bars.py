"""Progress of building and pushing an image, on stderr: bars on a terminal, else lines."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Self

from launcher.cli.ui.streams import unescaped
from launcher.text import size_text

if TYPE_CHECKING:
    from launcher.images.pipeline import Report


class Lines:
    """Prints lines; each layer is reported once, when it is uploaded."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        """Layers are uploaded in parallel, each on its own thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        print(f"launch: {text}", file=sys.stderr, flush=True)

    def layer(self, name: str, done: int, size: int) -> None:
        """Report that `done` of `size` bytes of a layer are uploaded."""
        with self._lock:
            if size and done >= size and name not in self._reported:
                self._reported.add(name)
                self.line(f"uploaded {name} ({size_text(size)})")


class Bars(Lines):
    """Draws a bar for each layer with rich, which is imported at the first upload."""

    def __init__(self) -> None:
        super().__init__()
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def line(self, text: str) -> None:
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
                self._progress.start()  # set before, so that Ctrl-C at any moment restores the cursor
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=size)
        self._progress.update(self._tasks[name], completed=done, total=size)


def bars() -> Any:
    """Return progress bars on stderr; rich obeys NO_COLOR."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", table_column=None)
    return Progress(
        name, BarColumn(20), DownloadColumn(), TransferSpeedColumn(), console=Console(file=unescaped(sys.stderr))
    )


def progress() -> Lines:
    """Return bars on a terminal, else lines."""
    return Bars() if sys.stderr.isatty() else Lines()


def report_to(to: Lines) -> Report:
    """Return the callbacks through which launcher.images reports progress."""
    from launcher.images.pipeline import Report

    return Report(line=to.line, layer=to.layer)

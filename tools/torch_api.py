"""`python -m tools.torch_api`: look up which releases of PyTorch define the names that the node and the API use.

The answers are read from the releases' own wheels on PyPI, a few files of each by range requests, and recorded in
tests/train/torch_api.csv. tests/train/test_any_torch.py compares them with the source.
"""

from __future__ import annotations

import ast
import csv
import html
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "train" / "torch_api.csv"
PACKAGE = ROOT / "train"
RELEASES = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0")
ENTRIES = (
    "launch_train.node.__main__",
    "launch_train.node.torchrun_wrapper",
    "launch_train.checkpoint",
    "launch_train.metrics",
)
"""What a custom script's container runs and imports."""
INDEX = "https://pypi.org/simple/torch/"
TOP = ("__init__.py", "_C/__init__.pyi", "_C/_VariableFunctions.pyi", "random.py", "serialization.py", "functional.py")
BEHIND = {
    "cuda": ("cuda/random.py", "cuda/streams.py", "cuda/memory.py"),
    "distributed": ("distributed/distributed_c10d.py", "_C/_distributed_c10d.pyi"),
    "distributed.tensor": ("distributed/tensor/_api.py",),
    "distributed.elastic": ("distributed/elastic/multiprocessing/api.py",),
    "nn": ("nn/modules/module.py",),
    "optim": ("optim/optimizer.py",),
}
"""Module -> files, below torch/, that it takes its names from."""


def main() -> int:
    """Write the table."""
    names = sorted(used_names())
    found: dict[str, list[str]] = {name: [] for name in names}
    for release in RELEASES:
        wheel = zipfile.ZipFile(io.BufferedReader(Remote(wheel_url(release)), 1 << 20))
        texts = Files(wheel)
        for name in names:
            if is_defined(name, texts):
                found[name].append(release)
        print(release, file=sys.stderr)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "releases"))
        writer.writerows((name, " ".join(releases)) for name, releases in found.items())
    return 0


# --- The names ------------------------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Return the modules that ENTRIES import, directly or not, wherever the import stands."""
    seen: dict[str, Path] = {}
    waiting = list(ENTRIES)
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if name in seen or path is None:
            continue
        seen[name] = path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    return seen


def module_file(name: str) -> Path | None:
    """Return the file of a module of launch_train, or None."""
    path = PACKAGE / name.replace(".", "/")
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if name.startswith("launch_train") and file.is_file()), None)


def used_names() -> set[str]:
    """Return the dotted names below torch that these modules use."""
    return {name for path in modules().values() for name in names_in(path)}


def names_in(path: Path) -> Iterator[str]:
    """Yield a file's names: what it imports from torch, and the attributes of that."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "torch":
                    known[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    yield from known.values()
    for node in ast.walk(tree):
        attributes: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        if attributes and isinstance(value, ast.Name) and value.id in known and "__" not in attributes[0]:
            yield ".".join((known[value.id], *reversed(attributes)))


# --- The wheels -----------------------------------------------------------------------------------------------------


class Files:
    """The text files of a wheel, each read once."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self._wheel, self._texts = wheel, dict[str, str]()
        self.names = frozenset(wheel.namelist())

    def text(self, name: str) -> str:
        """Return a file's text; empty: the wheel does not have it."""
        if name not in self._texts:
            self._texts[name] = self._wheel.read(name).decode() if name in self.names else ""
        return self._texts[name]


def is_defined(name: str, files: Files) -> bool:
    """Return whether a release defines a name: a module, or a definition in a file where it is looked for."""
    path = name.replace(".", "/")
    if f"{path}.py" in files.names or f"{path}/__init__.py" in files.names or name == "torch":
        return True
    last = re.escape(name.rpartition(".")[2])
    defines = re.compile(
        rf"^\s*(async )?(def|class) {last}\b|^\s*{last}\s*[:=]|^\s*(from \S+ )?import .*\b{last}\b|^\s+{last},?\s*$"
        rf"|self\.{last}\b",
        re.MULTILINE,
    )
    return any(defines.search(files.text(f"torch/{one}")) for one in places(name))


def places(name: str) -> tuple[str, ...]:
    """Return the files, below torch/, that may define a name: the modules above it, and where those import it from."""
    module = name.removeprefix("torch.").rpartition(".")[0]
    if not module:
        return TOP
    parts = module.split(".")
    above = ["/".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    own = [f"{one}{end}" for one in above for end in (".py", ".pyi", "/__init__.py")]
    return (
        *own,
        *(file for prefix, files in BEHIND.items() if f"{module}.".startswith(f"{prefix}.") for file in files),
    )


def wheel_url(release: str) -> str:
    """Return the address of a release's wheel for Linux."""
    with urlopen(INDEX, timeout=60) as answer:
        page = answer.read().decode()
    pattern = rf'href="([^"]+)"[^>]*>\s*torch-{re.escape(release)}-cp312-cp312-\w*x86_64\.whl'
    return urljoin(INDEX, html.unescape(re.search(pattern, page)[1]))  # type: ignore[index]  # a release without such a wheel is an error


class Remote(io.RawIOBase):
    """A file on a server that answers range requests: only the parts that are read are sent."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urlopen(Request(url, headers={"Range": "bytes=0-0"}), timeout=60) as answer:
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # only called by BufferedReader
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with urlopen(Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"}), timeout=120) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


if __name__ == "__main__":
    sys.exit(main())

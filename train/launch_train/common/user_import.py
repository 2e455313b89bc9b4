"""The user's own functions, by name: `my_pkg.model:build`. What goes wrong in them is one line, with its place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from launch_train.common import contract
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.text import did_you_mean

OURS = __name__.partition(".")[0]


class Own:
    """A function of the user's; `function` is the bare one. Calling this raises UsageError for what goes wrong in it,
    but for errors of the trainer's own."""

    def __init__(self, name: str, key: str, function: Callable[..., Any]) -> None:
        """`name` is what the spec says at `key` (model, data, loss)."""
        self.name, self.key, self.function = name, key, function

    def __call__(self, *args: Any, **settings: Any) -> Any:
        try:
            return self.function(*args, **settings)
        except TrainError:
            raise
        except (Exception, SystemExit) as error:
            raise self.wrong(f"failed {said(error)}") from error

    def wrong(self, what: str) -> UsageError:
        """An error about it."""
        return UsageError(f"{self.key}: {self.name} {what}")


def load(name: str, key: str = "run.config") -> Own:
    """The function that `name` (MODULE:FUNCTION) names.

    Raises UsageError: there is no such module or function, or the module can't be imported.
    """
    module_name, _, attribute = name.partition(":")
    module = _module(module_name, f"{key}: {name}")
    where = f"{key}: {name}: {_place(getattr(module, '__file__', None) or module_name)}"
    if not hasattr(module, attribute):
        raise UsageError(f"{where} has no {attribute}{_near(attribute, _public(module))}")
    function = getattr(module, attribute)
    if not callable(function):
        raise UsageError(f"{where}: {attribute} is no function, but {type(function).__name__}")
    return Own(name, key, function)


def _module(name: str, what: str) -> ModuleType:
    folder = _code()
    if str(folder) not in sys.path and "" not in sys.path:
        sys.path.append(str(folder))  # behind Python's own modules and ours, as the node does it
    if hidden := _hidden(name.partition(".")[0], folder):
        raise UsageError(f"{what}: {hidden}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{what}: {_not_found(name, error.name, folder)}") from error
        hint = f"; image.requirements is where it belongs if {error.name} is a package" if error.name else ""
        raise UsageError(f"{what} can't be imported {said(error)}{hint}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} can't be imported {said(error)}") from error


def _hidden(top: str, folder: Path) -> str:
    """That another module comes before the user's file or package of that name; empty if none does."""
    mine = [path for path in (folder / top, folder / f"{top}.py") if path.exists()]
    module = sys.modules.get(top)
    found = module.__spec__ if module else importlib.util.find_spec(top)
    if not mine or found is None:
        return ""
    places = [Path(place) for place in (found.origin, *(found.submodule_search_locations or ())) if place]
    if any(place.resolve().is_relative_to(path.resolve()) for place in places for path in mine):
        return ""
    whose = "Python's own" if top in sys.stdlib_module_names else "launch's own" if top == OURS else "the installed"
    return f"{_place(str(mine[0]))} can't be imported: {whose} module {top} comes first. Give it another name"


def _not_found(name: str, missing: str, folder: Path) -> str:
    """Which part of a module's name there is none of, and what there is instead."""
    near = _near(name, _modules(folder))
    parent = sys.modules.get(missing.rpartition(".")[0])
    if parent is not None and not hasattr(parent, "__path__"):
        return f"{_place(parent.__file__ or missing)} is a module, not a package with a {missing.rpartition('.')[2]}"
    return f"there is no module {missing} in {folder}, and none is installed{near}"


def _code() -> Path:
    return Path(os.environ.get(contract.CODE) or Path.cwd())


def _modules(folder: Path) -> Iterator[str]:
    """The modules of a folder of code, not deeper than three packages."""
    for depth in range(4):
        for path in folder.glob("*/" * depth + "*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if all(part.isidentifier() for part in parts) and parts[-1] != "__init__":
                yield ".".join(parts)


def _public(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def _near(name: str, known: Iterable[str]) -> str:
    near = did_you_mean(name, known)
    return f"; {near}" if near else ""


def said(error: BaseException) -> str:
    """`at my_pkg/model.py:12: NameError: name 'nn' is not defined`, in one line; the place is the user's."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"at {_place(error.filename or '?')}:{error.lineno}: {type(error).__name__}: {error.msg}"
    at = _where(error)
    return f"{at}: {type(error).__name__}{': ' if text else ''}{text[:300]}"


def _where(error: BaseException) -> str:
    """The last line of the user's code that led to an error; else the last line of all that is not ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    mine = [frame for frame in frames if Path(frame.filename).is_relative_to(_code()) and _is_written(frame.filename)]
    if not frames:
        return "when it was called"
    last = (mine or frames)[-1]
    return f"at {_place(last.filename)}:{last.lineno}"


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(Path(__file__).parents[1]) or filename.startswith("<frozen importlib")


def _is_written(filename: str) -> bool:
    """Rather than installed: a virtual environment may lie in the folder of the code."""
    return "site-packages" not in Path(filename).parts


def _place(filename: str) -> str:
    """A file as the user knows it: relative to the code."""
    path = Path(filename)
    return str(path.relative_to(_code())) if path.is_relative_to(_code()) else str(path)

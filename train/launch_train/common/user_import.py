"""Import user functions by name, such as `my_pkg.model:build`. Their errors become one line with the place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from launch_train.common import contract
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.text import did_you_mean

OWN_PACKAGE = __name__.partition(".")[0]


class UserFunction:
    """A user function; `function` is the bare one. Calling this raises UsageError for its errors, except for
    TrainErrors."""

    def __init__(self, name: str, key: str, function: Callable[..., Any]) -> None:
        """`name` is the value in the spec at `key` (model, data, loss)."""
        self.name, self.key, self.function = name, key, function

    def __call__(self, *args: Any, **settings: Any) -> Any:
        try:
            return self.function(*args, **settings)
        except TrainError:
            raise
        except (Exception, SystemExit) as error:
            raise self.error(f"failed {describe_error(error)}") from error

    def error(self, what: str) -> UsageError:
        return UsageError(f"{self.key}: {self.name} {what}")


def load_function(name: str, key: str = "run.config") -> UserFunction:
    """Return the function that `name` (MODULE:FUNCTION) names.

    Raises UsageError if the module or function doesn't exist, or the module can't be imported.
    """
    module_name, _, attribute = name.partition(":")
    module = _module(module_name, f"{key}: {name}")
    where = f"{key}: {name}: {_relative_path(getattr(module, '__file__', None) or module_name)}"
    if not hasattr(module, attribute):
        public = [member for member in vars(module) if not member.startswith("_")]
        raise UsageError(f"{where} has no {attribute}{_suggestion(attribute, public)}")
    function = getattr(module, attribute)
    if not callable(function):
        raise UsageError(f"{where}: {attribute} is not a function (type: {type(function).__name__})")
    return UserFunction(name, key, function)


def _module(name: str, what: str) -> ModuleType:
    folder = _code_folder()
    if str(folder) not in sys.path and "" not in sys.path:
        sys.path.append(str(folder))  # after the standard library and this package, as the node does
    if reason := _shadowed_by(name.partition(".")[0], folder):
        raise UsageError(f"{what}: {reason}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{what}: {_not_found(name, error.name, folder)}") from error
        hint = f"; if {error.name} is a package, add it to image.requirements" if error.name else ""
        raise UsageError(f"{what} can't be imported {describe_error(error)}{hint}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} can't be imported {describe_error(error)}") from error


def _shadowed_by(top: str, folder: Path) -> str:
    """Return an error if another module shadows the user's file or package of that name; empty if none does."""
    mine = [path for path in (folder / top, folder / f"{top}.py") if path.exists()]
    module = sys.modules.get(top)
    module_spec = module.__spec__ if module else importlib.util.find_spec(top)
    if not mine or module_spec is None:
        return ""
    places = [Path(place) for place in (module_spec.origin, *(module_spec.submodule_search_locations or ())) if place]
    if any(place.resolve().is_relative_to(path.resolve()) for place in places for path in mine):
        return ""
    whose = "Python's" if top in sys.stdlib_module_names else "launch's" if top == OWN_PACKAGE else "the installed"
    return f"{_relative_path(str(mine[0]))} can't be imported: {whose} module {top} shadows it; rename it"


def _not_found(name: str, missing: str, folder: Path) -> str:
    """Return which part of a module's name doesn't exist, and the nearest name that does."""
    modules: list[str] = []
    for depth in range(4):  # at most three packages deep
        for path in folder.glob("*/" * depth + "*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            if all(part.isidentifier() for part in parts) and parts[-1] != "__init__":
                modules.append(".".join(parts))
    near = _suggestion(name, modules)
    parent = sys.modules.get(missing.rpartition(".")[0])
    if parent is not None and not hasattr(parent, "__path__"):
        place, child = _relative_path(parent.__file__ or missing), missing.rpartition(".")[2]
        return f"{place} is a module, not a package with a {child}"
    return f"no module {missing} in {folder}, and none is installed{near}"


def _code_folder() -> Path:
    return Path(os.environ.get(contract.CODE) or Path.cwd())


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = did_you_mean(name, known)
    return f"; {near}" if near else ""


def describe_error(error: BaseException) -> str:
    """Return an error in one line, with its place in the user's code: `at my_pkg/model.py:12: NameError: name 'nn' is
    not defined`."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"at {_relative_path(error.filename or '?')}:{error.lineno}: {type(error).__name__}: {error.msg}"
    at = _where(error)
    return f"{at}: {type(error).__name__}{': ' if text else ''}{text[:300]}"


def _where(error: BaseException) -> str:
    """Return the last line of the user's code in the traceback, else the last line outside of this package."""
    frames: list[traceback.FrameSummary] = []
    user_frames: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(Path(__file__).parents[1]) or frame.filename.startswith("<frozen importlib"):
            continue
        frames.append(frame)
        # A virtual environment may be in the folder of the code.
        if path.is_relative_to(_code_folder()) and "site-packages" not in path.parts:
            user_frames.append(frame)
    if not frames:
        return "when it was called"
    last = (user_frames or frames)[-1]
    return f"at {_relative_path(last.filename)}:{last.lineno}"


def _relative_path(filename: str) -> str:
    """Return a file's path relative to the code."""
    path = Path(filename)
    return str(path.relative_to(_code_folder())) if path.is_relative_to(_code_folder()) else str(path)

"""Google's client packages, of which only the services that are used are imported.

Importing aiplatform_v1 or compute_v1 imports the clients of all their services: 1.6 and 2.5 s of CPU time, of which
launch needs 0.5 and 0.8 (google-cloud-aiplatform 2.7, google-cloud-compute 1.57, Python 3.11). From Python 3.15 on the
packages do by themselves what is done here (PEP 810: their `__lazy_modules__`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, Final

PACKAGES: Final = ("google.cloud.aiplatform_v1", "google.cloud.compute_v1")


class LazyPackageFinder:
    """Finds the packages for `import`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of such a package; None leaves every other module to Python."""
        spec = PathFinder.find_spec(name, path) if name in PACKAGES else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = LazyPackageLoader(name, spec.loader.path)
        return spec


class LazyPackageLoader(SourceFileLoader):
    """Loads a package that imports each service, type or module when its name is first used."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing; only a name that is none of these has the package's own code executed."""

        def find(name: str) -> Any:
            if name.startswith("__") or (found := attribute(module, name)) is None:
                vars(module).pop("__getattr__", None)
                super(LazyPackageLoader, self).exec_module(module)
                return getattr(module, name)
            setattr(module, name, found)
            return found

        vars(module)["__getattr__"] = find


def attribute(package: ModuleType, name: str) -> Any:
    """Return a module, client or type of a package by name; None if it has none of that name."""

    def submodule(path: str) -> ModuleType | None:
        folder = f"{package.__path__[0]}/{path}".rpartition("/")[0]
        full = f"{package.__name__}.{path.replace('/', '.')}"
        return import_module(full) if PathFinder.find_spec(full, [folder]) else None

    if module := submodule(name):
        return module
    if name.endswith("Client"):
        service = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Client")).lower()
        return getattr(submodule(f"services/{service}"), name, None)
    return getattr(submodule("types"), name, None)


def import_services_lazily() -> None:
    """Have both packages import their services when they are used, in this process. It may be called again."""
    if sys.version_info < (3, 15) and LazyPackageFinder not in sys.meta_path:
        sys.meta_path.insert(0, LazyPackageFinder)

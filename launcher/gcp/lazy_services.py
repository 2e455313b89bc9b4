"""Import only the services in use of Google's client packages.

Importing aiplatform_v1 or compute_v1 imports the clients of all their services: 1.6 and 2.5 s of CPU time, of which
launch needs 0.5 and 0.8 (google-cloud-aiplatform 2.7, google-cloud-compute 1.57, Python 3.11; `time python -c "import
google.cloud.compute_v1"`, and the same after `import launcher.gcp` with `.InstancesClient`). From Python 3.15 on the
packages do by themselves what is done here (PEP 810: their `__lazy_modules__`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from threading import RLock
from types import ModuleType
from typing import Any, Final

PACKAGES: Final = ("google.cloud.aiplatform_v1", "google.cloud.compute_v1")
DUNDERS: Final = ("__all__", "__version__")
"""Names that begin with underscores and that the packages themselves define."""


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
        """Defer the package's own code: it runs only for a name that is not a service, type or module."""
        lock, executed = RLock(), False

        def find(name: str) -> Any:
            """Return an attribute that the module does not have yet. Raises AttributeError. Thread-safe."""
            nonlocal executed
            attribute = None if name.startswith("__") else find_attribute(module, name)
            if attribute is None and (
                name in DUNDERS or not name.startswith("__")
            ):  # inspect and others probe for __wrapped__
                with lock:
                    if not executed:
                        executed = True  # the package itself may ask for a name that it lacks
                        try:
                            super(LazyPackageLoader, self).exec_module(module)
                        except BaseException:
                            executed = False
                            raise
                attribute = vars(module).get(name)
            if attribute is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            setattr(module, name, attribute)
            return attribute

        vars(module)["__getattr__"] = find


def find_attribute(package: ModuleType, name: str) -> Any:
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
    value = getattr(submodule("types"), name, None)
    return None if isinstance(value, ModuleType) else value


def import_services_lazily() -> None:
    """Make both packages import services on first use, in this process. Idempotent."""
    if sys.version_info < (3, 15) and LazyPackageFinder not in sys.meta_path:
        sys.meta_path.insert(0, LazyPackageFinder)

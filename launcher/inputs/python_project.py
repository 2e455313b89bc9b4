"""Read a project's packaging files as far as they are declarative, and install it for the image without running them.

Nothing of the project is run or imported: a dry run must be quick and without effects, and a build backend is neither.
What an editable install would write is made here instead: metadata, entry points, programs, and the folders to import
from. It becomes a part of the code's layer, so an edit needs no engine.
"""

from __future__ import annotations

import ast
import configparser
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher.errors import UsageError
from launcher.inputs import git
from launcher.inputs.python_files import normalised, parse_file
from launcher.spec.models import JobSpec

COMPILING: Final = frozenset({"maturin", "scikit_build_core.build", "mesonpy", "setuptools_rust"})
"""Build backends whose packages are compiled."""
UNKNOWN: Final = "0+unknown"
"""The version of a project that says it nowhere."""
VERSION_NAME: Final = re.compile(r"""(?im)^(?:__version__|version)(?:\s*:\s*str)?\s*=\s*(['"])v?(?P<version>.+?)\1""")
"""hatchling's own default (hatchling/version/source/regex.py)."""
Data = Mapping[str, Any]


class Project(NamedTuple):
    """A Python project, as its packaging files describe it."""

    folder: str
    """Relative to the code's folder; empty: that folder itself."""
    name: str
    version: str
    roots: tuple[str, ...]
    """Folders whose modules can be imported, relative to the code's folder."""
    entry_points: dict[str, dict[str, str]]
    """Group -> name -> MODULE:OBJECT."""
    requires_python: str
    requires: tuple[str, ...] | None
    """The dependencies; None: a program or a file that isn't named computes them."""
    extras: dict[str, tuple[str, ...]]
    top_level: tuple[str, ...]
    """The modules and packages that it installs."""
    compiled: tuple[str, ...]
    """Modules that only a compiler makes, and that the folder doesn't have."""

    @property
    def scripts(self) -> dict[str, str]:
        """Return the programs that an install puts on PATH."""
        return {**self.entry_points.get("gui_scripts", {}), **self.entry_points.get("console_scripts", {})}


class Packaging(NamedTuple):
    """The packaging files of a project's folder, `top`."""

    top: Path
    pyproject: Data
    config: Data
    """setup.cfg."""
    keywords: Data
    """The arguments of setup() in setup.py."""

    @property
    def tool(self) -> Data:
        """Return the tables of tools in pyproject.toml."""
        return subtable(self.pyproject, "tool")

    @property
    def backend(self) -> str:
        """Return the module that builds the project."""
        return str(subtable(self.pyproject, "build-system").get("build-backend", "setuptools.build_meta"))


def read_project(code: Path, folder: str = "") -> Project | None:
    """Return the project in a folder of the code; None: no file there names one. Raises UsageError: a file of it
    can't be read."""
    top = code / folder
    files = {name: top / name for name in ("pyproject.toml", "setup.cfg", "setup.py") if (top / name).is_file()}
    pyproject = read_toml(files["pyproject.toml"]) if "pyproject.toml" in files else {}
    config = setup_cfg(files["setup.cfg"]) if "setup.cfg" in files else {}
    keywords = setup_py(files["setup.py"]) if "setup.py" in files else {}
    packaging = Packaging(top, pyproject, config, keywords)
    declared, poetry = subtable(pyproject, "project"), subtable(pyproject, "tool", "poetry")
    options, metadata = subtable(config, "options"), subtable(config, "metadata")
    name = next((each for of in (declared, poetry, metadata, keywords) if isinstance(each := of.get("name"), str)), "")
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", name):
        return None
    roots = import_roots(packaging, name)
    points = {
        **{group: dict(names) for group, names in subtable(declared, "entry-points").items()},
        **{group: dict(names) for group, names in subtable(poetry, "plugins").items()},
        **{group: as_table(lines) for group, lines in subtable(config, "options.entry_points").items()},
        **entry_points_of(keywords.get("entry_points")),
    }
    for group, names in (
        ("console_scripts", subtable(declared, "scripts") or subtable(poetry, "scripts")),
        ("gui_scripts", subtable(declared, "gui-scripts")),
    ):
        points[group] = {**points.get(group, {}), **names}
    listed, in_files = dependency_lists(dict(pyproject))
    requires: Any = listed.get("", None if in_files.get("") else [])
    if not declared:
        requires = as_list(options.get("install_requires", keywords.get("install_requires", ())))
    groups = {normalised(each) for each in subtable(pyproject, "dependency-groups")}
    extras = {each: tuple(needs) for each, needs in listed.items() if each not in groups | {""}}
    extras |= {each: tuple(needs) for each, needs in subtable(keywords, "extras_require").items() if as_list(needs)}
    extras |= {each: tuple(as_list(text) or ()) for each, text in subtable(config, "options.extras_require").items()}
    return Project(
        folder=folder,
        name=name,
        version=project_version(packaging, roots, name),
        roots=tuple("/".join(filter(None, (folder, root))) for root in roots),
        entry_points={group: {each: str(target) for each, target in names.items()} for group, names in points.items()},
        requires_python=str(declared.get("requires-python", options.get("python_requires", ""))),
        requires=None if requires is None else tuple(requires),
        extras=extras,
        top_level=top_level(top, roots, name, points.get("console_scripts", {})),
        compiled=tuple(compiled_modules(packaging, roots)),
    )


def read_projects(code: Path, folders: Sequence[str] = ()) -> list[Project]:
    """Return the project of the code's folder, if it can be read, and those in `folders` of it. Raises UsageError."""
    try:
        projects = [read_project(code)]
    except (UsageError, AttributeError, TypeError, ValueError):  # malformed: nothing of it was asked for
        projects = []
    projects += [read_project(code, folder) for folder in dict.fromkeys(folders) if folder]
    return [project for project in projects if project]


def module_roots(spec: JobSpec, projects: Sequence[Project]) -> tuple[str, ...]:
    """Return the folders that modules are imported from, relative to the code's own (empty), in their order."""
    own = [posixpath.normpath(folder) for folder in spec.env.get("PYTHONPATH", "").split(":") if folder]
    roots = (root for project in projects for root in project.roots)
    return tuple(dict.fromkeys(["" if root == "." else root for root in (*own, "", *roots)]))


def compiled_warnings(projects: Sequence[Project]) -> Iterator[str]:
    """Yield a warning for each project with compiled modules: nothing compiles them."""
    for project in projects:
        if project.compiled:
            more = f" and {len(project.compiled) - 3} more" if len(project.compiled) > 3 else ""
            yield (
                f"{project.name}: {', '.join(project.compiled[:3])}{more}: compiled modules, which the image lacks. "
                "Code that imports them fails; image.requirements can name a release of the project with wheels."
            )


def installed_files(projects: Sequence[Project]) -> dict[str, str]:
    """Return what installing the projects writes, by name: the metadata of each, a program for each script in bin/,
    and code.pth, the folders (relative to the code's own) from which their modules are imported."""
    files: dict[str, str] = {}
    for project in projects:
        info = f"{normalised(project.name).replace('-', '_')}-{project.version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {project.name}", f"Version: {project.version}"]
        lines += [f"Requires-Python: {project.requires_python}"] if project.requires_python else []
        lines += [f"Requires-Dist: {need}" for need in project.requires or ()]
        lines += [f"Provides-Extra: {extra}" for extra in project.extras]
        files[f"{info}/METADATA"] = "\n".join(lines) + "\n"
        files[f"{info}/INSTALLER"] = "launch\n"
        files[f"{info}/top_level.txt"] = "".join(f"{module}\n" for module in project.top_level)
        sections = [
            "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in sorted(names.items()))])
            for group, names in sorted(project.entry_points.items())
            if names
        ]
        if sections:
            files[f"{info}/entry_points.txt"] = "\n\n".join(sections) + "\n"
        for name, target in project.scripts.items():
            module, _, attribute = target.partition("[")[0].replace(" ", "").partition(":")
            if (
                re.fullmatch(r"[\w.-]+", name)
                and re.fullmatch(r"[\w.]+", module)
                and re.fullmatch(r"[\w.]+", attribute)
            ):
                first = attribute.partition(".")[0]
                files[f"bin/{name}"] = (
                    f"#!/usr/bin/env python\nimport sys\n\nfrom {module} import {first}\n\n"
                    f'if __name__ == "__main__":\n    sys.exit({attribute}())\n'
                )
    if projects:
        files["code.pth"] = "".join(f"{root}\n" for project in projects for root in project.roots if root)
    return files


# --- Files ----------------------------------------------------------------------------------------------------------


def subtable(data: Data, *keys: str) -> Data:
    """Return a table within tables; empty if one of them does not exist or is something else."""
    for key in keys:
        inner = data.get(key)
        data = inner if isinstance(inner, Mapping) else {}
    return data


def as_table(text: Any) -> dict[str, str]:
    """Return the lines `NAME = VALUE` of a setup.cfg's option."""
    pairs = (line.partition("=")[::2] for line in str(text).splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def as_list(value: Any) -> list[str] | None:
    """Return a list of requirements: of setup.py, or the lines of a setup.cfg's option. None: it is something else."""
    if isinstance(value, str):
        value = [line.strip() for line in value.splitlines() if line.strip() and not line.strip().startswith("#")]
    return list(value) if isinstance(value, list | tuple) and all(isinstance(need, str) for need in value) else None


def entry_points_of(value: Any) -> dict[str, dict[str, str]]:
    """Return the `entry_points` of a setup.py, which are a table of lists, or a text like a setup.cfg."""
    if isinstance(value, str):
        groups = re.split(r"(?m)^\s*\[(.+?)\]\s*$", value)[1:]
        return {group: as_table(lines) for group, lines in zip(groups[::2], groups[1::2], strict=True)}
    pairs = value.items() if isinstance(value, dict) else ()
    return {group: as_table("\n".join(as_list(names) or ())) for group, names in pairs}


def setup_cfg(path: Path) -> dict[str, dict[str, str]]:
    """Return the sections of a setup.cfg. Raises UsageError."""
    parser = configparser.RawConfigParser()
    parser.optionxform = lambda optionstr: optionstr  # type: ignore[method-assign]  # names of programs keep their case
    try:
        parser.read_string(read_text(path))
    except configparser.Error as error:
        raise UsageError(f"{path} can't be read: {error}", "Correct it: it describes your project.") from error
    return {section: dict(parser[section]) for section in parser.sections()}


UNREADABLE: Final = object()
"""A value that a setup.py computes."""


def setup_py(path: Path) -> dict[str, Any]:
    """Return the arguments of the call of setup() in a file, those that are constants, names of constants, or lists and
    tables of them; others are UNREADABLE."""
    try:
        tree = parse_file(path)
    except (SyntaxError, ValueError, RecursionError, OSError):
        return {}
    bound = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def value(node: ast.expr, depth: int = 0) -> Any:
        match node:
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name) if name in bound and depth < 3:
                return value(bound[name], depth + 1)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                values = [value(item, depth) for item in items]
                return UNREADABLE if UNREADABLE in values else values
            case ast.Dict(keys=keys, values=items):
                return {
                    key.value: value(item, depth)
                    for key, item in zip(keys, items, strict=True)
                    if isinstance(key, ast.Constant)
                }
            case ast.Call(func=ast.Name(id="find_packages") | ast.Attribute(attr="find_packages"), args=args):
                where = [each.value for each in node.keywords if each.arg == "where"]
                return {"where": value((args or where or [ast.Constant(".")])[0], depth)}
        return UNREADABLE

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) == "setup"]
    keywords = {each.arg: value(each.value) for call in named[:1] for each in call.keywords if each.arg}
    if "ext_modules" in keywords:
        names = []
        for call in calls:
            if str(getattr(call.func, "id", getattr(call.func, "attr", ""))).endswith("Extension"):
                named_so = [each.value for each in call.keywords if each.arg == "name"]
                names += [value(node) for node in (call.args or named_so)[:1]]
        keywords["ext_modules"] = [each for each in names if isinstance(each, str) and each] or keywords["ext_modules"]
    return keywords


# --- Where modules are ----------------------------------------------------------------------------------------------


def import_roots(packaging: Packaging, name: str) -> list[str]:
    """Return the folders, relative to the project, from which an install imports its modules; empty: the project's own.

    They are those that the backend's settings name, else `src` by the rules of that backend.
    """
    top, tool, config, keywords = packaging.top, packaging.tool, packaging.config, packaging.keywords
    backend = packaging.backend.partition(".")[0]
    named: list[Any] = []
    if backend == "setuptools":
        setuptools = subtable(tool, "setuptools")
        directories = subtable(setuptools, "package-dir") or subtable(keywords, "package_dir")
        directories = directories or as_table(subtable(config, "options").get("package_dir", ""))
        named = [folder for package, folder in directories.items() if not package]
        search_in = subtable(setuptools, "packages", "find").get("where") or subtable(keywords, "packages").get("where")
        search_in = search_in or as_list(subtable(config, "options.packages.find").get("where", ""))
        named += [search_in] if isinstance(search_in, str) else search_in or []
        # A package with a folder of its own can be imported only if the folder has the package's name.
        named += [
            folder.rpartition("/")[0]
            for package, folder in directories.items()
            if package and f"/{folder}".endswith(f"/{package.replace('.', '/')}")
        ]
    elif backend == "hatchling":
        wheel = subtable(tool, "hatch", "build", "targets", "wheel") or subtable(tool, "hatch", "build")
        named = [str(package).rpartition("/")[0] for package in wheel.get("packages", ())]
        named += [folder for folder in wheel.get("sources", ()) if isinstance(folder, str)]
    elif backend == "poetry":
        named = [package.get("from", "") for package in subtable(tool, "poetry").get("packages", ())]
    elif backend == "pdm":
        build = subtable(tool, "pdm", "build")
        named = [build["package-dir"]] if "package-dir" in build else []
    elif backend == "uv_build":
        named = [subtable(tool, "uv", "build-backend").get("module-root", "src")]
    roots = [str(root).strip("/").removeprefix("./").removeprefix(".") for root in named if isinstance(root, str)]
    roots = [root for root in dict.fromkeys(roots) if ".." not in root.split("/")]
    module = normalised(name).replace("-", "_")
    # Of a package that is itself called src, the modules are src.x.
    is_src = not (top / "src" / "__init__.py").exists() and (
        (top / "src" / module).is_dir()
        or (top / "src" / f"{module}.py").is_file()
        or (
            backend in ("setuptools", "pdm")
            and any((top / "src").glob("*/__init__.py"))
            and not keywords.get("packages")
        )
    )
    return roots or (["src"] if is_src else [""])


def top_level(top: Path, roots: Sequence[str], name: str, scripts: Data) -> tuple[str, ...]:
    """Return the modules that an install provides: in a folder of their own all packages, else those that have the
    project's name or a program."""
    module = normalised(name).replace("-", "_")
    named = (
        {module} if any((top / root / end).exists() for root in roots for end in (module, f"{module}.py")) else set()
    )
    packages = {file.parent.name for root in roots if root for file in (top / root).glob("*/__init__.py")}
    return tuple(
        sorted({*named, *packages, *(str(target).partition(":")[0].partition(".")[0] for target in scripts.values())})
    )


def compiled_modules(packaging: Packaging, roots: Sequence[str]) -> Iterator[str]:
    """Yield the compiled modules of a project that its folder lacks."""
    if packaging.backend in COMPILING:
        yield f"what {packaging.backend.partition('.')[0]} builds"
    keywords = packaging.keywords
    extensions = keywords.get("ext_modules") or subtable(packaging.tool, "setuptools").get("ext-modules") or []
    if extensions is UNREADABLE or keywords.get("rust_extensions") or keywords.get("cffi_modules"):
        yield "what setup.py compiles"
        return
    for extension in extensions:
        module = str(extension.get("name") if isinstance(extension, dict) else extension)
        path = module.replace(".", "/")
        if not any(
            [*(packaging.top / root).glob(f"{path}.*so"), *(packaging.top / root).glob(f"{path}.pyd")] for root in roots
        ):
            yield module


# --- The version ----------------------------------------------------------------------------------------------------


def project_version(packaging: Packaging, roots: Sequence[str], name: str) -> str:
    """Return the first valid version that a place says, else UNKNOWN."""
    from packaging.version import InvalidVersion, Version

    for text in said_versions(packaging, roots, name):
        try:
            return str(Version(text))
        except InvalidVersion:
            continue
    return UNKNOWN


def said_versions(packaging: Packaging, roots: Sequence[str], name: str) -> Iterator[str]:
    """Yield the version by each place that may say it: the packaging files, the files that they name, then
    `__version__` in the package, a file VERSION or version.txt, and git's newest tag."""
    top, tool, config, keywords = packaging.top, packaging.tool, packaging.config, packaging.keywords
    yield str(subtable(packaging.pyproject, "project").get("version", subtable(tool, "poetry").get("version", "")))
    yield str(keywords.get("version", ""))
    option = str(subtable(config, "metadata").get("version", ""))
    dynamic = dict(subtable(tool, "setuptools", "dynamic", "version"))
    for kind in ("attr", "file"):
        dynamic |= {kind: option.partition(":")[2].strip()} if option.startswith(f"{kind}:") else {}
    yield "" if dynamic else option
    if isinstance(attribute := dynamic.get("attr"), str):
        module, _, variable = attribute.rpartition(".")
        yield from assigned(top, roots, module, variable)
    files = dynamic.get("file", ())
    for file in [files] if isinstance(files, str) else files:
        yield stripped_text(top / file)
    hatch, pdm = subtable(tool, "hatch", "version"), subtable(tool, "pdm", "version")
    for settings in (hatch, pdm):
        if isinstance(settings.get("path"), str):
            pattern = settings.get("pattern")
            expression = re.compile(pattern) if isinstance(pattern, str) and "?P<version>" in pattern else VERSION_NAME
            if match := expression.search(stripped_text(top / settings["path"])):
                yield match["version"]
    module = normalised(name).replace("-", "_")
    for part in ("__about__", "_version", "version", "__init__"):
        yield from assigned(top, roots, module if part == "__init__" else f"{module}.{part}", "__version__")
    for root in roots:
        yield from (stripped_text(top / root / module / file) for file in ("version.txt", "VERSION"))
    yield from (stripped_text(top / file) for file in ("VERSION", "version.txt"))
    # As setuptools-scm counts: 1.3.dev5+gabc1234 five commits after v1.2.
    described = git.git_output(top, "describe", "--tags", "--long", "--match", "*[0-9]*")
    if match := re.fullmatch(r".*?(\d+(?:\.\d+)*)([^-]*)-(\d+)-(g[0-9a-f]+)", described):
        release, rest, commits, commit = match.groups()
        before, dot, last = release.rpartition(".")
        yield release + rest if commits == "0" else f"{before}{dot}{int(last) + 1}.dev{commits}+{commit}"


def stripped_text(path: Path) -> str:
    """Return a file's text without white space around it; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def assigned(top: Path, roots: Sequence[str], module: str, variable: str, depth: int = 3) -> Iterator[str]:
    """Yield the text that a module assigns to a variable, directly or by an import from another one of the project."""
    paths = [top / root / module.replace(".", "/") for root in (*roots, "")]
    file = next(
        (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None
    )
    try:
        body = parse_file(file).body if file else []
    except (SyntaxError, ValueError, RecursionError, OSError):
        return
    package = module if file and file.name == "__init__.py" else module.rpartition(".")[0]
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))) if name == variable:
                yield text
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))) if name == variable:
                yield text
            case ast.ImportFrom(module=source, level=level, names=names) if depth:
                for alias in names:
                    if (alias.asname or alias.name) == variable:
                        above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                        yield from assigned(top, roots, ".".join(filter(None, [*above, source])), alias.name, depth - 1)


def invalid(problem: str, hint: str = "") -> UsageError:
    """Return the error of an `image.requirements` that can't be used."""
    return UsageError(f"image.requirements: {problem}", hint, field="image.requirements")


def read_text(path: Path) -> str:
    """Return a file's text. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        what = error.strerror if isinstance(error, OSError) else error
        raise invalid(f"{path} can't be read: {what}", "The path is relative to the spec file.") from error


def read_toml(path: Path, hint: str = "") -> dict[str, Any]:
    """Return a TOML file's content. Raises UsageError."""
    import tomllib

    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{path} isn't TOML: {error}", hint) from error


def dependency_lists(data: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, list[str]]]:
    """Return the requirements that a pyproject.toml lists, and the files with others that setuptools or
    hatch-requirements-txt read: of each extra or dependency group, and of the project itself (by an empty name)."""
    project, tool = data.get("project"), data.get("tool", {})
    project = project if isinstance(project, dict) else {}
    hook = tool.get("hatch", {}).get("metadata", {}).get("hooks", {}).get("requirements_txt", {})
    dynamic = tool.get("setuptools", {}).get("dynamic", {})
    lists = {**data.get("dependency-groups", {}), **project.get("optional-dependencies", {})}
    own = project.get("dependencies")
    if isinstance(own, list) and all(isinstance(need, str) for need in own):
        lists[""] = own
    files = {name: entry.get("file") for name, entry in dynamic.get("optional-dependencies", {}).items()}
    files |= hook.get("optional-dependencies", {})
    files[""] = dynamic.get("dependencies", {}).get("file") or hook.get("files")
    return (
        {normalised(name): needs for name, needs in lists.items()},
        {normalised(name): [names] if isinstance(names, str) else names for name, names in files.items() if names},
    )

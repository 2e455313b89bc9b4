"""Settings files: the `launch.yaml` that the specs of a folder share, and the user's own `config.yaml`.

Both have the same fields: defaults for fields of the spec, under their names, and the section `project` with the caps.
They are read with the spec's own reader, so errors have the same form. A launch.yaml lies beside the spec: a file that
merely is in the current folder is never read. There is no `identity`: who a job runs as is said in the spec.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from launcher.errors import SpecError
from launcher.spec.decoding import Decoder
from launcher.spec.kinds import BUCKET, LabelKey, LabelValue, Model, Region, Repository, matching
from launcher.spec.models import JobSpec
from launcher.spec.nodes import Map, Node, node_at, plain
from launcher.spec.reader import Located, Override, by_line, content, load_text
from launcher.spec.shapes import shape_of

NAME: Final = "launch.yaml"


class Project(Model, frozen=True, kw_only=True):
    """The project, and the caps on every run in the cloud."""

    id: Annotated[str, Meta(min_length=1, description="the project's ID; default: gcloud's project")] | None = None
    max_usd_per_run: (
        Annotated[float, Meta(gt=0, description="refuse a plan that could cost more, in USD, or whose cost is unknown")]
        | None
    ) = None
    regions: Annotated[tuple[Region, ...], Meta(description="the allowed regions; default: all")] = ()
    machines: Annotated[
        tuple[Annotated[str, Meta(description="a GPU (l4) or a machine type (a3-highgpu-8g)")], ...],
        Meta(description="the allowed GPUs and machine types; default: all"),
    ] = ()
    required_labels: Annotated[
        tuple[LabelKey, ...], Meta(description="labels that every spec must set, in its labels section")
    ] = ()
    owner_label: Annotated[
        Literal["hashed", "plain", "none"] | None,
        Meta(
            description="the label launch-owner: a hash of gcloud's account, the account itself, or no label "
            "(default: hashed)"
        ),
    ] = None


class ImageDefaults(Model, frozen=True, kw_only=True):
    """The default of a field of the spec's section `image`."""

    repository: Repository | None = None


class SettingsFile(Model, frozen=True, kw_only=True):
    """The fields of a settings file. All but `project` are defaults for the spec's fields of that name."""

    project: Project = Project()
    regions: Annotated[
        tuple[Region, ...] | Literal["any"] | None,
        Meta(description="regions in fallback order; any: all that have the machine, cheapest first"),
    ] = None
    image: ImageDefaults = ImageDefaults()
    output: Annotated[str | None, matching(BUCKET, "where runs are stored: gs://BUCKET/PATH")] = None
    labels: Annotated[dict[LabelKey, LabelValue], Meta(max_length=50, description="labels of the job and its VMs")] = (
        field(default_factory=dict)
    )


class Settings(Struct, frozen=True):
    """A settings file with the position of each of its values; without a file all fields have their defaults."""

    values: SettingsFile = SettingsFile()
    root: Node = Map("", {})

    @property
    def project(self) -> Project:
        """Return the section `project`."""
        return self.values.project

    def place(self, field: str) -> str:
        """Return `file:line` of a field of the section `project`."""
        return node_at(self.root, ("project", field)).where


def read_project_file(folder: Path | None, spec: Path | None = None) -> Settings:
    """Read the launch.yaml in the spec's `folder`; None: the spec is not a file, so none applies.

    `spec` is the spec's path, as errors name its folder; a spec that is itself called launch.yaml has no such file.
    Raises SpecError with all problems.
    """
    path = folder / NAME if folder else None
    if path is None or not (path.exists() or path.is_symlink()) or (spec and spec.name == NAME):
        return Settings()
    return read_settings(path, str((spec.parent if spec else path.parent) / NAME))


def user_settings_path(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the user's settings: below XDG_CONFIG_HOME (on Windows APPDATA), else ~/.config.

    None if the user has no home folder. A relative XDG_CONFIG_HOME is ignored, as its specification demands: it would
    name a file in the current folder.
    """
    folder = environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME", "")
    if not folder or not Path(folder).is_absolute():
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError:  # no HOME, and no user entry for this uid, as in some containers
            return None
    return Path(folder, "launch", "config.yaml")


def read_settings(path: Path, source: str) -> Settings:
    """Read a settings file; errors name it `source`. Raises SpecError with all problems."""
    decoded = decode_file(path, source, SettingsFile)
    return Settings(*decoded) if decoded else Settings()


def decode_file(path: Path, source: str, model: Any, root: type[Struct] | None = None) -> tuple[Any, Node] | None:
    """Return the content of a YAML file as a model (or a dict of `root`), and its nodes; None: the file has no lines.

    Errors name it `source`. Raises SpecError with all problems.
    """
    text = content(path, source)
    if all(not line.strip() or line.lstrip().startswith(b"#") for line in text.splitlines()):
        return None
    loaded = load_text(text, source)
    decoder = Decoder(root or model)
    decoded = decoder.decode(loaded.root, shape_of(model), ())
    if problems := [*loaded.problems, *decoder.problems]:
        raise SpecError(by_line(problems, source))
    return decoded, loaded.root


class Origin(Struct, frozen=True):
    """A field of the spec that a settings file has set, and its position there."""

    field: str
    where: str


def with_settings(
    located: Located, files: Sequence[Settings], *, output: bool = True
) -> tuple[Located, tuple[Origin, ...]]:
    """Return the spec with the fields that it leaves open from the settings files, the first file first, and where each
    is from. With `output=False`, that field stays as it is.

    Raises SpecError: the fields cannot be combined.
    """
    origins: list[Origin] = []
    for file in files:
        nodes = {".".join(path): node_at(file.root, path) for path in open_fields(located.spec, file.values, output)}
        if nodes:
            overrides = [Override(name, plain(node), node.where, node) for name, node in nodes.items()]
            located = located.changed(overrides)
            origins += [Origin(name, node.where) for name, node in nodes.items()]
    return located, tuple(origins)


def open_fields(spec: JobSpec, values: SettingsFile, output: bool) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a file's fields that the spec leaves open."""
    has_place = spec.zones or any(model.startswith("reservation:") for model in spec.provisioning or ())
    if values.regions is not None and spec.regions is None and not has_place:
        yield ("regions",)
    if values.output is not None and spec.output is None and output:
        yield ("output",)
    is_pushed = spec.image.uri is None or spec.run.node == "append"
    if values.image.repository is not None and spec.image.repository is None and is_pushed:
        yield ("image", "repository")
    yield from (("labels", key) for key in values.labels if key not in spec.labels)

"""Check what loggers (run.loggers, run.config.loggers) need of the image and the job. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.catalog import Catalog
from launcher.errors import PlanRefused
from launcher.plan.model import Context
from launcher.plan.torch_build import uses_base_torch
from launcher.spec.models import JobSpec

PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow-skinny", "mlflow")}
"""Packages that have a logger's client; one of them must be in the image."""
BOARD = frozenset({"tensorboard", "vertex"})
"""Loggers that write TensorBoard's event files, which a TensorBoard instance on Vertex AI reads."""


def loggers_of(spec: JobSpec) -> tuple[str, tuple[str, ...] | None]:
    """Return the setting and its loggers; None: the default."""
    if spec.run.is_builtin:
        loggers = spec.run.config.get("loggers")
        return "run.config.loggers", None if loggers is None else tuple(loggers)
    return "run.loggers", spec.run.loggers


def check_loggers(spec: JobSpec, catalog: Catalog, context: Context) -> None:
    """Check that each logger has its package in the image and its settings in the job. Raises PlanRefused."""
    field, names = loggers_of(spec)
    if names is None or context.target == "local":
        return
    # Otherwise the image may have the package.
    is_known = not (spec.image.uri or spec.image.setup or uses_base_torch(spec, catalog))
    for name in names:
        packages = PACKAGES.get(name, ())
        if packages and is_known and not set(packages) & set(context.packages.loggers):
            raise PlanRefused(
                f"{field}: {name}: the image would not have its package",
                f"Add a line to image.requirements ({spec.image.requirements or 'requirements.txt'}): {packages[0]}",
                field=field,
            )
    if "vertex" in names and context.target == "vm":
        raise PlanRefused(
            f"{field}: vertex: only jobs on Vertex AI have a TensorBoard instance",
            "Use tensorboard (the events are in the run folder), or Vertex AI: launch vertex SPEC",
            field=field,
        )
    if context.target == "vertex":
        check_board(spec, field, names)


def check_board(spec: JobSpec, field: str, names: tuple[str, ...]) -> None:
    """Check that a TensorBoard instance has events, and the events an instance. Raises PlanRefused."""
    if "vertex" in names and not spec.vertex.tensorboard:
        raise PlanRefused(
            f"{field}: vertex: the job has no TensorBoard instance",
            "Name one: --set vertex.tensorboard=projects/P/locations/L/tensorboards/ID\n"
            "To list them: gcloud ai tensorboards list --region REGION",
            field=field,
        )
    if spec.vertex.tensorboard and BOARD.isdisjoint(names):
        raise PlanRefused(
            f"vertex.tensorboard would stay empty: {field} names neither vertex nor tensorboard",
            f"Add vertex to {field}, or remove vertex.tensorboard.",
            field="vertex.tensorboard",
        )


def about_loggers(spec: JobSpec, context: Context) -> Iterator[str]:
    """Yield what a logger lacks to reach its server, as far as the spec says."""
    field, names = loggers_of(spec)
    names = names or ()
    variables = spec.env.keys() | spec.secrets.keys()
    if context.target == "local":
        if "vertex" in names:
            yield f"{field}: vertex has no effect on this machine; the TensorBoard events are in the run folder."
        return
    if "wandb" in names and "WANDB_API_KEY" not in variables and spec.env.get("WANDB_MODE") in (None, "online"):
        yield f"{field}: wandb needs WANDB_API_KEY; set secrets.WANDB_API_KEY, or env.WANDB_MODE: offline."
    if "mlflow" in names and "MLFLOW_TRACKING_URI" not in variables:
        yield f"{field}: mlflow needs env.MLFLOW_TRACKING_URI; without it, its rows stay on the job's machine."

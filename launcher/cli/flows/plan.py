"""Gather the inputs of a plan from a spec and the flags of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.options import Flags, overrides
from launcher.inputs import gather as inputs_of
from launcher.inputs.gather import GatherOptions, Inputs

if TYPE_CHECKING:
    from launcher.plan.model import Target
    from launcher.spec.reader import Override


def gather(target: Target, spec: Path | None, flags: Flags, *, more: Sequence[Override] = (), **options: Any) -> Inputs:
    """Return the inputs of a plan. `more` are overrides in addition to the flags. `options` and errors are those of
    `launcher.inputs.gather.gather`."""
    return inputs_of.gather(target, spec, [*overrides(flags), *more], GatherOptions(run_id=flags.run_id, **options))

"""A VM's plan, from what was typed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from launcher.cli.flows.plan import planned
from launcher.cli.gather import Inputs, gather
from launcher.cli.options import Flags, Output

if TYPE_CHECKING:
    from launcher.spec.reader import Override


class Extra(Struct, frozen=True, kw_only=True):
    """What only `launch vm` takes. `training` is False for a VM to work on."""

    overrides: tuple[Override, ...] = ()
    allow_default_account: bool = False
    training: bool = True


def gathered(spec: Path | None, flags: Flags, extra: Extra) -> Inputs:
    """All that planning needs. Raises SpecError, UsageError."""
    return gather(
        "vm",
        spec,
        flags,
        training=extra.training,
        more=extra.overrides,
        allow_default_account=extra.allow_default_account,
    )


def shown_plan(inputs: Inputs, output: Output) -> None:
    """The dry run."""
    from launcher.cli.ui.plan_page import show

    show(planned(inputs), output)

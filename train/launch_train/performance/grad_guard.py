"""Steps whose gradients are not finite: skipped on the device, without asking it, and counted when it is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from launch_train.common.errors import NonFiniteError
from launch_train.telemetry.rows import Row

EMPTY_MASK = (
    ". A custom loss that divides by the size of a mask is 0/0 for a micro-batch without a counted target: "
    "return (sum, count) instead"
)


def skip_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Let the next step of a fused optimizer change nothing if the gradients' norm is infinite or no number.

    The flag is the one that GradScaler hands to fused optimizers; it stays on the device. The norm is the same on all
    ranks, so that all of them skip.
    """
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # torch.amp.GradScaler sets it too


class Guard:
    """Counts skipped steps. The same rows on all ranks: all of them stop at the same step."""

    def __init__(self, most: int, *, masked: bool = False) -> None:
        """`most` steps in a row may be skipped. `masked`: some targets may not count, in a micro-batch perhaps none."""
        self.most, self.in_a_row, self.skipped = most, 0, 0
        self.hint = EMPTY_MASK if masked else ""

    def look(self, rows: Iterable[Row]) -> list[int]:
        """The steps that were skipped, of a block of rows.

        Raises NonFiniteError: more in a row than may be.
        """
        found: list[int] = []
        for row in rows:
            if "skipped" not in row:
                self.in_a_row = 0
                continue
            found.append(int(row["step"]))
            self.in_a_row += 1
            self.skipped += 1
            if self.in_a_row > self.most:
                raise NonFiniteError(
                    f"step {row['step']}: the gradients were not finite in {self.in_a_row} steps in a row. The rows of "
                    "the last ones name the samples (events non_finite); a lower lr, grad_clip, or precision: fp32 or "
                    f"bf16 may help, and so may a look at the data{self.hint}",
                    step=found[-1],
                )
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]

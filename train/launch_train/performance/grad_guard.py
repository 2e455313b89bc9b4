"""Skip steps with non-finite gradients on the GPU, without a host sync; count them when metrics are read."""

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
    """Make the optimizer's next step change nothing if the gradient norm is infinite or NaN.

    Sets `found_inf`, the flag that GradScaler passes to fused optimizers; it stays on the device. The norm is the same
    on all ranks, so all of them skip.
    """
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # torch.amp.GradScaler sets it too


class GradGuard:
    """Counts skipped steps. All ranks see the same rows, so all stop at the same step."""

    def __init__(self, max_in_a_row: int, *, masked: bool = False) -> None:
        """`masked`: a micro-batch may have no target that counts."""
        self.max_in_a_row, self.in_a_row, self.skipped = max_in_a_row, 0, 0
        self.hint = EMPTY_MASK if masked else ""

    def check(self, rows: Iterable[Row]) -> list[int]:
        """Count the skipped steps of a block and return their numbers.

        Raises NonFiniteError if more than `max_in_a_row` steps in a row were skipped.
        """
        steps: list[int] = []
        for row in rows:
            if "skipped" not in row:
                self.in_a_row = 0
                continue
            steps.append(int(row["step"]))
            self.in_a_row += 1
            self.skipped += 1
            if self.in_a_row > self.max_in_a_row:
                raise NonFiniteError(
                    f"step {row['step']}: the gradients were not finite in {self.in_a_row} steps in a row. The events "
                    "non_finite in the run folder name the samples: check that data. A lower lr, grad_clip, or "
                    f"precision: fp32 or bf16 may help{self.hint}",
                    step=steps[-1],
                )
        return steps

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]

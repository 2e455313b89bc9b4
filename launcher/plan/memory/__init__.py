"""GPU memory of a training run, by formula. Pure, and without torch: docs/estimate.md has the formulas."""

"""The containerised trainer: one process a GPU, started by `train.node` on each machine."""

"""The containerised trainer: one process a GPU, started by `launch_train.node` on each machine."""

"""The implementation of `launch_train.checkpoint`: checkpoints of custom scripts."""

"""Behind `from train import checkpoint`: checkpoints of a script of the user's own."""

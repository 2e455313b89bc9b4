"""The training loop, told as one story in `train`, and what only it uses."""

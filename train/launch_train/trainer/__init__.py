"""The training loop (`train`) and what only it uses."""

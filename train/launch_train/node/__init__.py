"""The agent on each machine: it starts, watches and ends the training processes there."""

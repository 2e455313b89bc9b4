"""One machine of a run: what the platform starts, and what starts, watches and ends the training processes there."""

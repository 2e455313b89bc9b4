"""Checkpoints: format, lease, saving, loading and retention."""

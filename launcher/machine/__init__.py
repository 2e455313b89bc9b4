"""This machine's readiness for training: what is read of it, and the checks."""

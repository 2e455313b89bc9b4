"""Checkpoints: what they are made of, who may write them, and going on from one."""

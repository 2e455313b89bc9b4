"""Sweeps: plan, run, find and cancel the points of one."""

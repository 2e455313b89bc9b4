"""Techniques for speed and memory, one module each, chosen by the machine or set in the spec."""

"""Metrics, files and log text, kept on the machine's disk until they are in the run folder."""

"""Readers of a run folder's files, shared by launcher and report. Standard library only."""

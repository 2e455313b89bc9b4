"""The files of a run folder, for all who read them: launcher, node, trainer and report. Standard library only."""

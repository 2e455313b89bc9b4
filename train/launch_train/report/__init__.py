"""A report on runs: one HTML file made from their folders, with the standard library alone (docs/see.md)."""

from launch_train.report.page import page
from launch_train.runfolder.run import RunData, read_run

__all__ = ["RunData", "page", "read_run"]

"""Check whether a project is ready: reads, checks, and the commands that fix the findings."""

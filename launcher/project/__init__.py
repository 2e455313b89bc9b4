"""A project's readiness: what is read of it, the checks, and the commands that fix what they find."""

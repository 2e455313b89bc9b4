"""`launch selftest`: run every feature once in a project, on small machines, and check each step.

`steps` are the checks, those of `project` among them, `cleanup` removes what they created, `recording` keeps the
requests and answers, `bundle` redacts them.
"""

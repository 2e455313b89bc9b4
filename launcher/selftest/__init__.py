"""`launch selftest`: run every feature once in a project, on small machines, and check each step.

`steps` are the checks, `course` runs them, `cleanup` removes what they made, `recording` keeps the requests and
answers, `bundle` redacts them, `compare` compares their shapes with those of the tests' loopback cloud.
"""

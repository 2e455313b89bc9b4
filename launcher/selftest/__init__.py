"""`launch selftest`: everything that launch does in a project, done once on small machines, each step with a check.

`steps` are the checks, `course` runs them, `cleanup` removes what they made, `recording` keeps the requests and
answers, `bundle` redacts them, `compare` holds their shapes against those of the tests' loopback cloud.
"""

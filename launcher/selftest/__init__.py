"""`launch selftest`: run every feature once in a project, on small machines, and check each step.

`steps` are the commands with their expected ends, `kit` runs them; `cleanup` removes what they created; `recording`
keeps the requests and answers, and writes them to a bundle for bug reports.
"""

"""A machine that is reached by SSH: what runs there for launch. Standard library only, for Python 3.10 or later."""

"""`launch local`: a request's replicas on this machine, in processes or in Docker."""

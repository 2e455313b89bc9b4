"""Recorded dry runs of every job spec; `make golden` renews them. Their diff shows what a change does to requests."""

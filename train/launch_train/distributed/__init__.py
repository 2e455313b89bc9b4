"""Ranks: the process group, consensus, peers, DTensor."""

"""One run: its ledger, its attempts, how it is submitted, watched and ended."""

"""What processes leave behind them: rows, files and text, kept on the machine's disk until the run folder has them."""

"""Effects, one module for each outside world. Nothing here decides; nothing elsewhere acts."""

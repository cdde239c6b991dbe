"""``mempool info``: the command and its output."""

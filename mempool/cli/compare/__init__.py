"""``mempool compare``: the command and its output."""

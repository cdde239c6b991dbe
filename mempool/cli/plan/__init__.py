"""``mempool plan``: the command and the computation."""

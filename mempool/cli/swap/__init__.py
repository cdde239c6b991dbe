"""``mempool swap``: the command, the computation and the output."""

"""``mempool fit``: the command, its arguments, the computation and the output."""

"""``mempool run``: the command, the replacement of the process, and the bootstrap inside the program."""

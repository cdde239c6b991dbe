"""Swapping while a program runs: tensors that wait for their next use do so in the host's memory.

`mempool.torch.install` with ``limit`` begins it (`attached`). The design is in docs/swapping.md; the way from
an operation to a copy: `swapper` (a dispatch mode) -> `iterations` (the plan) and `governor` (room at once)
-> `mover` -> `engine`.
"""

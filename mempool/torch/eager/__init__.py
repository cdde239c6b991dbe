"""Swapping while a program runs: tensors are offloaded to host memory between their uses.

`mempool.torch.install` with ``limit`` starts swapping (`attached`). The design is in docs/swapping.md. The
path from an operation to a copy: `swapper` (a dispatch mode) -> `iterations` (the plan) and `governor`
(evictions) -> `mover` -> `engine`.
"""

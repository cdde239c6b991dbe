"""Callbacks for trainers: a pool watches the optimizer, logs its numbers, and leaves evaluation unplanned.

* `mempool.torch.integrations.transformers.PoolCallback` for `transformers.Trainer` and its subclasses;
* `mempool.torch.integrations.lightning.PoolCallback` for `lightning.Trainer`;
* `mempool.torch.integrations.accelerate.PoolTracker` for `accelerate.Accelerator`.
"""

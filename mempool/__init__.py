"""mempool."""

"""The demonstration: a small but real network, trained with the default allocator and with the pool."""

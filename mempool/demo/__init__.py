"""The demonstration: a small network, trained with the default allocator and with the pool."""

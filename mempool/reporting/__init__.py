"""Reports of a pool: numbers, reasons of misses, and faults found by ``check=True``."""

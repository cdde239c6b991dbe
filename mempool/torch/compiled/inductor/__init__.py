"""Memory of the kernels that inductor makes of a rewritten graph."""

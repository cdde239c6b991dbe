"""Memory of the kernels into which inductor compiles a rewritten graph."""
